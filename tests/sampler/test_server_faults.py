"""What can go wrong between a learner and a served sampler: nothing of it reaches the version that serves."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import time
from pathlib import Path

import pytest
import torch

from onegrid.cli.serve import bind, is_loopback, run
from onegrid.errors import ConfigError, SyncError
from onegrid.guard.freshness import fresh_tokens
from onegrid.sampler import wire
from onegrid.sampler.remote import RemoteConfig, read_token
from onegrid.sampler.server.app import Limits
from onegrid.sync import buckets, manifest_of, push
from onegrid.types import Batch, Manifest, Sequence
from tests.sampler.served import connected, get, post, serving
from tests.sampler.tiny import engine_of, plan_of, requests_of, snapshot_of

SPEC, PLAN = plan_of("dense", "mxfp8")
POST = {"content-type": "application/json"}


def snapshot(version, seed=1):
    return snapshot_of(SPEC, PLAN, seed, version=version)


def tokens_of(remote):
    return [r.tokens_R.tolist() for r in remote.generate(requests_of(6))]


def test_without_the_right_token_nothing_answers_but_health(tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("letmein\n")
    right = tmp_path / "right"
    right.write_text("secret-token\n")
    with serving(engine_of("dense", "mxfp8"), PLAN.digest, token="secret-token") as url:
        assert get(f"{url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer letmein"}, {"authorization": "secret-token"}):
            for path in ("/onegrid/v1/status", "/onegrid/v1/describe", "/v1/models", "/nowhere"):
                assert get(url + path, headers=headers).status_code == 401
            assert post(f"{url}/onegrid/v1/begin", json={}, headers=headers).status_code == 401
        with pytest.raises(SyncError, match="401"), connected(url, PLAN.digest, token_file=str(wrong)):
            pass
        with connected(url, PLAN.digest, token_file=str(right)) as remote:
            push(snapshot(1), remote)
            assert remote.version == 1


def test_a_connection_cut_in_a_bucket_leaves_the_old_version_serving_and_the_next_push_whole():
    with serving(engine_of("dense", "mxfp8"), PLAN.digest) as url, connected(url, PLAN.digest) as remote:
        before = tokens_of(remote)
        new = snapshot(1)
        remote.begin(manifest_of(new))
        body = wire.pack_bucket(next(iter(buckets(new, 50_000))))
        host, port = url.removeprefix("http://").split(":")
        head = (
            f"POST /onegrid/v1/receive HTTP/1.1\r\nhost: {host}\r\ncontent-type: {wire.FRAME}\r\n"
            f"x-onegrid-client: {remote._client.headers['x-onegrid-client']}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port))) as cut:
            cut.sendall(head.encode() + body[: len(body) // 2])
        time.sleep(0.2)
        assert remote.version == 0
        with pytest.raises(SyncError, match="never arrived"):
            remote.commit(1)
        remote.abort()
        assert tokens_of(remote) == before
        push(new, remote)
        assert remote.version == 1 and tokens_of(remote) != before


def test_of_two_clients_that_update_at_once_the_second_is_refused_and_the_first_goes_through():
    with (
        serving(engine_of("dense", "mxfp8"), PLAN.digest) as url,
        connected(url, PLAN.digest) as first,
        connected(url, PLAN.digest) as second,
    ):
        new = snapshot(1)
        first.begin(manifest_of(new))
        for call in (
            lambda: second.begin(manifest_of(snapshot(2))),
            lambda: push(snapshot(2), second),
            lambda: second.commit(1),
            second.sleep,
        ):
            with pytest.raises(SyncError) as caught:
                call()
            assert caught.value.condition == "C5"
        second.abort()  # harms nobody
        for bucket in buckets(new):
            first.receive(bucket)
        first.commit(1)
        with pytest.raises(SyncError, match="not proved yet") as caught:
            second.generate(requests_of(1))
        assert caught.value.condition == "C7"
        first.accept()
        assert second.generate(requests_of(1))[0].version_R.tolist()[0] == 1
        push(snapshot(2, seed=2), second)
        assert first.version == 2


def test_a_client_that_vanishes_after_its_commit_loses_the_version_it_never_accepted():
    now = [0.0]
    limits = Limits(update_seconds=2.0)
    with (
        serving(engine_of("dense", "mxfp8"), PLAN.digest, limits=limits, clock=lambda: now[0]) as url,
        connected(url, PLAN.digest) as gone,
        connected(url, PLAN.digest) as other,
    ):
        before = tokens_of(other)
        push(snapshot(1), gone)  # and no word after it
        now[0] += limits.update_seconds
        assert other.version == 0 and tokens_of(other) == before
        push(snapshot(1, seed=2), other)
        assert other.version == 1


def test_a_restarted_server_is_seen_as_one_that_serves_old_weights():
    with serving(engine_of("dense", "mxfp8"), PLAN.digest) as url:
        port = int(url.rpartition(":")[2])
        with connected(url, PLAN.digest) as remote:
            push(snapshot(3), remote)
            assert fresh(remote, 3).passed
            address = remote.url
    with connected_again(address, port) as remote:
        verdict = fresh(remote, 3)
        assert verdict.status == "failed" and verdict.condition == "C7"
        push(snapshot(3), remote)
        assert fresh(remote, 3).passed


def test_a_restart_within_a_synchronization_fails_it():
    new = snapshot(1)
    with serving(engine_of("dense", "mxfp8"), PLAN.digest) as url:
        port = int(url.rpartition(":")[2])
        with connected(url, PLAN.digest) as remote:
            remote.begin(manifest_of(new))
            client = remote._client.headers["x-onegrid-client"]
    with connected_again(url, port) as remote:
        remote._client.headers["x-onegrid-client"] = client
        with pytest.raises(SyncError, match="the server was restarted"):
            remote.receive(next(iter(buckets(new))))
        assert remote.version == 0


def test_nobody_at_the_address_is_an_error_that_names_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(SyncError, match=url), connected(url, PLAN.digest):
            pass


def test_a_body_that_is_too_large_is_refused_before_it_is_read():
    limits = Limits(body_bytes=20_000)
    with serving(engine_of("dense", "mxfp8"), PLAN.digest, limits=limits) as url, connected(url, PLAN.digest) as remote:
        remote.begin(manifest_of(snapshot(1)))
        with pytest.raises(SyncError, match=r"lower guard.bucket_bytes"):
            remote.receive(next(iter(buckets(snapshot(1), 50_000))))
        remote.abort()
        push(snapshot(1), remote, bucket_bytes=10_000)
        assert remote.version == 1
        endless = (b"x" * 1000 for _ in range(100))
        answer = post(f"{url}/onegrid/v1/digest", content=endless, headers=POST)
        assert answer.status_code == 413


GARBAGE = [b"", b"\x00" * 64, b"\xff" * 8 + b"{}", b"\x80\x04\x95pickle", (1 << 62).to_bytes(8, "little") + b"{}"]


@pytest.mark.parametrize("body", GARBAGE, ids=repr)
def test_garbage_in_place_of_a_bucket_is_refused_and_changes_nothing(garbled, body):
    url, remote, before = garbled
    remote.begin(manifest_of(snapshot(1)))
    headers = dict(remote._client.headers) | {"content-type": wire.FRAME}
    answer = post(f"{url}/onegrid/v1/receive", content=body, headers=headers)
    assert answer.status_code == 400 and "frame" in answer.json()["error"]["message"]
    remote.abort()
    assert tokens_of(remote) == before


@pytest.fixture(scope="module")
def garbled():
    with serving(engine_of("dense", "mxfp8"), PLAN.digest) as url, connected(url, PLAN.digest) as remote:
        yield url, remote, tokens_of(remote)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("begin", b"{"),
        ("begin", b"[1]"),
        ("begin", b'{"version": 1, "plan_digest": "x", "entries": {"a": 5}}'),
        ("begin", b'{"version": "1", "plan_digest": "x", "entries": {}}'),
        ("begin", b'{"version": 1, "plan_digest": "x", "entries": {}, "extra": 1}'),
        ("commit", b'{"version": true}'),
        ("generate", b'{"requests": [{"prompt_index": 0}]}'),
        ("generate", b'{"requests": 7}'),
        ("probe", b'{"prompts": [[]], "captured": false}'),
        ("digest", b'{"names": [1]}'),
        ("adopt", b'{"plan": "{}"}'),
        ("begin", b"[" * 100_000),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_body_of_another_shape_is_refused_with_its_reason(garbled, path, body):
    answer = post(f"{garbled[0]}/onegrid/v1/{path}", content=body, headers=POST)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_a_page_in_a_browser_can_neither_post_nor_reach_a_tokenless_server_by_another_name(garbled):
    answer = post(f"{garbled[0]}/onegrid/v1/abort", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    with serving(engine_of("dense", "mxfp8"), PLAN.digest, hosts=["127.0.0.1"]) as url:
        assert get(f"{url}/health").status_code == 200
        assert get(f"{url}/health", headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    "pieces",
    [
        [["a", "codes", 0, 5]],
        [["a", "codes", 0, -1], ["a", "codes", 0, 5]],
        [["a", "codes", 0]],
        "all",
        [["a", 1, 0, 4]],
    ],
    ids=str,
)
def test_a_bucket_whose_names_and_bytes_disagree_is_no_bucket(pieces):
    frame = wire.pack({"version": 1, "pieces": pieces}, {"data": torch.zeros(4, dtype=torch.uint8)})
    with pytest.raises(wire.WireError):
        wire.unpack_bucket(frame)


def test_an_address_beyond_this_machine_needs_a_token(tmp_path):
    with pytest.raises(ConfigError, match="there is no token"):
        run(
            tmp_path,
            "mxfp8",
            host="0.0.0.0",
            port=0,
            token_file=None,
            device="cpu",
            max_slots=1,
            max_len=16,
            max_body_mib=1,
            update_seconds=60.0,
        )
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not (is_loopback("0.0.0.0") or is_loopback("::") or is_loopback("example.org"))


def test_a_token_file_that_cannot_be_used_says_why(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path in (empty, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=path.name):
            read_token(str(path))
    with pytest.raises(ConfigError, match="http"):
        RemoteConfig(url="localhost:8000")


def test_a_port_that_is_taken_says_so():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="choose another --port"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_a_pickle_in_place_of_any_message_runs_nothing(tmp_path):
    class Touch:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for read in (wire.unpack, wire.unpack_bucket, lambda body: wire.unpack_rollouts(body, [])):
        with pytest.raises(wire.WireError):
            read(pickle.dumps(Touch()))
    assert not (tmp_path / "ran").exists()


def test_a_manifest_crosses_as_it_is():
    manifest = manifest_of(snapshot(1))
    assert wire.read(Manifest, json.loads(json.dumps(wire.tree(manifest))), "manifest") == manifest


@contextlib.contextmanager
def connected_again(url, port):
    """A server anew at the same port, and a client."""
    with serving(engine_of("dense", "mxfp8"), PLAN.digest, port=port) as again, connected(again, PLAN.digest) as remote:
        assert again == url
        yield remote


def fresh(remote, version):
    """The verdict on tokens that the sampler makes now, by a learner of `version`."""
    sequences = tuple(
        Sequence(
            tokens_T=r.tokens_R,
            num_prompt=1,
            sampler_logp_R=r.logp_R,
            version_R=r.version_R,
            advantage_R=r.logp_R,
            mask_R=r.logp_R < 1,
            group_id=0,
        )
        for r in remote.generate(requests_of(3))
    )
    return fresh_tokens(Batch(sequences=sequences), version=version)
