"""Clients that mean harm, are slow, go away, or come two at a time: the version that was proved goes on serving."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from onegrid.errors import CapabilityError, SyncError
from onegrid.sampler import wire
from onegrid.sampler.server.app import Limits
from onegrid.sampler.server.lease import Lease
from onegrid.sync import buckets, manifest_of, push
from tests.patience import PATIENCE_S
from tests.sampler.served import connected, post, serving
from tests.sampler.test_server import openai_model
from tests.sampler.tiny import engine_of, plan_of, requests_of, snapshot_of

SPEC, PLAN = plan_of("dense", "mxfp8")
OTHER_MODEL = plan_of("moe", "mxfp8")[1]
POST = {"content-type": "application/json"}
LINEAR = "model.layers.0.self_attn.q_proj.weight"


def snapshot(version, seed=1):
    return snapshot_of(SPEC, PLAN, seed, version=version)


def tokens_of(remote):
    return [r.tokens_R.tolist() for r in remote.generate(requests_of(6))]


@pytest.fixture(scope="module")
def served():
    with (
        serving(engine_of("dense", "mxfp8"), PLAN.digest, model=openai_model()) as url,
        connected(url, PLAN.digest) as remote,
    ):
        yield url, remote, tokens_of(remote)


def asked(**fields):
    """A request of the protocol with some fields changed, of the request or of its sampling."""
    tree = wire.tree(requests_of(1)[0])
    for name, value in fields.items():
        (tree["sampling"] if name in tree["sampling"] else tree)[name] = value
    return {"requests": [tree]}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("generate", asked(prompt_tokens=[10**30]), "outside the vocabulary"),
        ("generate", asked(prompt_tokens=[-1]), "outside the vocabulary"),
        ("generate", asked(temperature=1e-42), "temperature is 1e-42"),  # 1 / T is infinite in FP32
        ("generate", asked(temperature=1e308), "temperature is 1e+308"),
        ("generate", asked(stop_token_ids=[10**30]), "stop_token_ids"),
        ("generate", asked(max_new_tokens=10**30), "positions"),
        ("probe", {"prompts": [[10**9]], "captured": False}, "each from 0 to 39"),
        ("probe", {"prompts": [[-1]], "captured": False}, "each from 0 to 39"),
        ("probe", {"prompts": [[1], [1] * 500], "captured": False}, "prompt 1 of 2 has 500 tokens"),
        ("stored", {"name": "nobody"}, "nobody"),
        ("adopt", {"plan": "[" * 100_000}, "not a plan"),
        ("adopt", {"plan": OTHER_MODEL.to_json()}, "no tensor"),
        ("multiply", wire.pack({"key": "nobody"}, {"x": torch.zeros(2, 64)}), "no linear 'nobody'"),
        ("multiply", wire.pack({"key": LINEAR}, {"x": torch.zeros(3, 3)}), "do not fit"),
        ("multiply", wire.pack({"key": LINEAR}, {"x": torch.zeros(2, 64, dtype=torch.int64)}), "dtype torch.int64"),
    ],
    ids=lambda x: str(x)[-60:],
)
def test_what_no_engine_can_answer_is_refused_by_name_and_changes_nothing(served, path, body, named):
    url, remote, before = served
    kind, content = (wire.FRAME, body) if isinstance(body, bytes) else ("application/json", json.dumps(body))
    headers = dict(remote._client.headers) | {"content-type": kind}
    answer = post(f"{url}/onegrid/v1/{path}", content=content, headers=headers)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert tokens_of(remote) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tree: tree.update(version=10**30), "allowed are -1 to"),
        (lambda tree: tree.update(version=-7), "allowed are -1 to"),
        (lambda tree: tree.update(version=0), "versions only grow"),
        (lambda tree: part_of(tree).update(num_bytes=0), "comes with shape"),
        (lambda tree: part_of(tree).update(num_bytes=10**18), "comes with shape"),
        (lambda tree: part_of(tree).update(shape=[10**9]), "comes with shape"),
        (lambda tree: part_of(tree).update(dtype="__class__"), "comes with shape"),
        (lambda tree: tree["entries"].pop(LINEAR), "missing from the manifest"),
        (lambda tree: tree["entries"].update(ghost=tree["entries"][LINEAR]), "ghost"),
    ],
)
def test_a_manifest_that_lies_opens_nothing(served, change, named):
    url, remote, before = served
    tree = json.loads(json.dumps(wire.tree(manifest_of(snapshot(1)))))
    change(tree)
    answer = post(f"{url}/onegrid/v1/begin", json=tree, headers=dict(remote._client.headers) | POST)
    assert answer.status_code == 409 and named in answer.json()["error"]["message"]
    with pytest.raises(SyncError, match="no update of this client is open"):
        remote.commit(1)
    assert tokens_of(remote) == before


def part_of(tree):
    return tree["entries"][LINEAR]["parts"]["codes"]


def test_buckets_replayed_of_another_version_or_reordered_are_told_apart(served):
    _, remote, before = served
    new = snapshot(1)
    pieces = list(buckets(new, 20_000))
    for wrong, named in (
        ([pieces[0], pieces[0]], "arrived twice"),
        ([next(iter(buckets(snapshot(2), 20_000)))], "a bucket of version 2 in the transaction of 1"),
        (pieces[:-1], "never arrived"),
    ):
        remote.begin(manifest_of(new))
        with pytest.raises(SyncError, match=named):
            for bucket in wrong:
                remote.receive(bucket)
            remote.commit(1)
        remote.abort()
        assert remote.version == 0 and tokens_of(remote) == before
    remote.begin(manifest_of(new))
    for bucket in reversed(pieces):  # any order is one
        remote.receive(bucket)
    remote.commit(1)
    with pytest.raises(SyncError, match="receive without begin"):
        remote.receive(pieces[0])
    remote.abort()
    assert remote.version == 0 and tokens_of(remote) == before, "never accepted"


def test_whoever_does_not_say_who_it_is_updates_nothing(served):
    """Two clients without a name would share one lease, and the OpenAI endpoints would be served with what it holds."""
    url, remote, before = served
    answer = post(f"{url}/onegrid/v1/begin", json=wire.tree(manifest_of(snapshot(1))))
    assert answer.status_code == 409 and "x-onegrid-client" in answer.json()["error"]["message"]
    assert tokens_of(remote) == before


class Gated:
    """An engine whose next generation waits; `on_commit` is called in the middle of a commit."""

    def __init__(self, engine, *, on_commit=lambda: None):
        self.engine, self.on_commit = engine, on_commit
        self.gate, self.reached = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, requests, on_finished=None):
        self.reached.set()
        assert self.gate.wait(PATIENCE_S)
        return self.engine.generate(requests, on_finished)

    def commit(self, version):
        self.on_commit()
        return self.engine.commit(version)


def test_a_request_that_waited_through_a_commit_is_not_served_with_what_nobody_has_proved():
    """It would also settle the version, and the sender's abort would then undo nothing."""
    engine = Gated(engine_of("dense", "mxfp8"))
    with (
        serving(engine, PLAN.digest, model=openai_model()) as url,
        connected(url, PLAN.digest) as learner,
        connected(url, PLAN.digest) as early,
        connected(url, PLAN.digest) as late,
        ThreadPoolExecutor(4) as threads,
    ):
        learner.begin(manifest_of(snapshot(1)))
        for bucket in buckets(snapshot(1)):
            learner.receive(bucket)
        first = threads.submit(early.generate, requests_of(2))
        assert engine.reached.wait(PATIENCE_S)
        second = threads.submit(late.generate, requests_of(2))
        third = threads.submit(post, f"{url}/v1/completions", json={"prompt": [1], "max_tokens": 2})
        time.sleep(0.3)  # both stand in line now
        committed = threads.submit(learner.commit, 1)
        time.sleep(1.0)  # and so does this
        engine.gate.set()
        assert {int(v) for r in first.result() for v in r.version_R} == {0}
        with pytest.raises(SyncError, match="not proved yet") as caught:
            second.result()
        assert caught.value.condition == "C7"
        assert third.result().status_code == 409 and "not proved yet" in third.result().text
        committed.result()
        learner.abort()
        assert learner.version == 0
        assert {int(v) for r in late.generate(requests_of(2)) for v in r.version_R} == {0}


def test_a_commit_that_takes_longer_than_the_lease_is_not_undone_under_its_sender():
    now = [0.0]
    limits = Limits(update_seconds=2.0)

    def take_long():
        now[0] += 10 * limits.update_seconds
        time.sleep(0.3)  # the other one asks meanwhile

    engine = Gated(engine_of("dense", "mxfp8"), on_commit=take_long)
    engine.gate.set()
    with (
        serving(engine, PLAN.digest, limits=limits, clock=lambda: now[0]) as url,
        connected(url, PLAN.digest) as learner,
        connected(url, PLAN.digest) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        done = threads.submit(push, snapshot(1), learner)
        while not done.done():
            assert other.version in (0, 1)  # every question looks whether the lease has lapsed
        done.result()
        learner.accept()
        assert other.version == 1


def test_only_silence_ends_a_lease():
    now = [0.0]
    lease = Lease(10.0, clock=lambda: now[0])
    lease.take("a")
    with lease.at_work():
        now[0] = 100.0
        assert not lease.lapsed
    now[0] = 109.0
    assert not lease.lapsed
    now[0] = 110.0
    assert lease.lapsed
    with pytest.raises(SyncError, match="must say who it is"):
        Lease(10.0).take("")


def test_a_slow_client_and_one_that_stops_in_its_headers_keep_nobody_waiting():
    now = [0.0]
    limits = Limits(update_seconds=2.0)
    with (
        serving(engine_of("dense", "mxfp8"), PLAN.digest, limits=limits, clock=lambda: now[0]) as url,
        connected(url, PLAN.digest) as remote,
    ):
        host, port = url.removeprefix("http://").split(":")
        new = snapshot(1)
        remote.begin(manifest_of(new))
        (bucket,) = buckets(new)
        body = wire.pack_bucket(bucket)
        name = remote._client.headers["x-onegrid-client"]
        head = (
            f"POST /onegrid/v1/receive HTTP/1.1\r\nhost: {host}\r\ncontent-type: {wire.FRAME}\r\n"
            f"x-onegrid-client: {name}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        with (
            socket.create_connection((host, int(port))) as stuck,
            socket.create_connection((host, int(port))) as slow,
            connected(url, PLAN.digest) as other,
        ):
            stuck.sendall(b"POST /onegrid/v1/begin HTTP/1.1\r\nhost:")
            slow.sendall(head.encode())
            step = -(-len(body) // 8)
            for start in range(0, len(body), step):  # longer than the lease in all, never silent for as long
                slow.sendall(body[start : start + step])
                assert other.version == 0 and len(other.generate(requests_of(1))) == 1
                now[0] += 0.5
            assert slow.recv(12) == b"HTTP/1.1 200"
        remote.commit(1)
        remote.accept()
        assert remote.version == 1


def test_a_client_that_goes_away_while_it_is_answered_leaves_the_others_their_turn():
    engine = Gated(engine_of("dense", "mxfp8"))
    with serving(engine, PLAN.digest) as url, connected(url, PLAN.digest) as remote:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps(asked()).encode()
        head = "POST /onegrid/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}"
        with socket.create_connection((host, int(port))) as gone:
            gone.sendall(head.encode() + b"\r\n\r\n" + body)
            assert engine.reached.wait(PATIENCE_S)
        engine.gate.set()
        push(snapshot(1), remote)
        assert {int(v) for r in remote.generate(requests_of(2)) for v in r.version_R} == {1}


class Broken:
    """An engine with a fault of its own in one method."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def digest(self, names):
        raise RuntimeError("a bug")


def test_a_fault_of_the_server_itself_has_an_answer_and_the_next_call_too():
    with serving(Broken(engine_of("dense", "mxfp8")), PLAN.digest) as url, connected(url, PLAN.digest) as remote:
        before = tokens_of(remote)
        with pytest.raises(SyncError, match="the server failed: RuntimeError: a bug"):
            push(snapshot(1), remote)  # whose proof asks for digests
        assert remote.version == 0 and tokens_of(remote) == before


def test_an_unknown_version_is_refused_wherever_it_is_asked_for(served):
    _, remote, before = served
    remote.begin(manifest_of(snapshot(1)))
    with pytest.raises(SyncError, match="commit of 9 in the transaction of 1") as caught:
        remote.commit(9)
    assert caught.value.condition == "C7"
    remote.abort()
    with pytest.raises(CapabilityError, match="has no field"):
        wire.read(type(requests_of(1)[0]), wire.tree(requests_of(1)[0]) | {"version": 9}, "request")
    assert tokens_of(remote) == before
