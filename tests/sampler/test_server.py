"""A sampler behind HTTP is the sampler: the same bytes through a real socket, whole synchronizations included."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from onegrid.errors import CapabilityError, SyncError
from onegrid.sampler.server.openai import Model
from onegrid.sync import push
from tests.bytes import assert_same_bytes
from tests.sampler.served import connected, get, post, serving
from tests.sampler.tiny import engine_of, plan_of, requests_of, snapshot_of


class Letters:
    """One character for a token."""

    def encode(self, text):
        return [ord(c) % 40 for c in text]

    def decode(self, ids):
        return "".join(chr(65 + int(i)) for i in ids)


def openai_model(**changes):
    return Model(**{"name": "tiny", "tokenizer": Letters(), "stop_token_ids": (3, 5), "max_len": 64} | changes)


def assert_same_rollouts(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.request, one.finish, one.text) == (other.request, other.finish, other.text)
        for name in ("tokens_R", "logp_R", "version_R"):
            assert_same_bytes(getattr(one, name), getattr(other, name))
        assert (one.routing_RLE is None) == (other.routing_RLE is None)
        if one.routing_RLE is not None:
            assert_same_bytes(one.routing_RLE, other.routing_RLE)
        assert (one.kept is None) == (other.kept is None)
        for a, b in zip(one.kept or (), other.kept or (), strict=True):
            assert_same_bytes(a, b)


@pytest.fixture(scope="module")
def pair():
    """(remote, its engine's twin in this process, snapshot of version 1)"""
    spec, plan = plan_of("moe", "mxfp8")
    with serving(engine_of("moe", "mxfp8"), plan.digest) as url, connected(url, plan.digest) as remote:
        yield remote, engine_of("moe", "mxfp8"), snapshot_of(spec, plan, 1, version=1)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_p": 0.7}, {"record_routing": True}, {"temperature": 0.0}],
    ids=["plain", "kept", "routing", "greedy"],
)
def test_rollouts_that_crossed_the_wire_have_the_bytes_of_those_made_here(pair, sampling):
    remote, twin, _ = pair
    requests = requests_of(9, **sampling)
    told = []
    assert_same_rollouts(remote.generate(requests, told.append), twin.generate(requests))
    assert [r.request for r in told] == requests


def test_every_question_gets_the_answer_of_the_engine_itself(pair):
    remote, twin, _ = pair
    assert remote.version == twin.version == 0
    assert remote.capabilities == twin.capabilities
    assert remote.describe() == twin.describe()
    names = list(twin.weights.names())
    assert remote.digest(names) == twin.digest(names)
    for one, other in zip(remote.probe([(1, 2, 3), (4,)]), twin.probe([(1, 2, 3), (4,)]), strict=True):
        assert_same_bytes(one, other)
    x = torch.randn(16, 64).to(torch.bfloat16)
    key = "model.layers.0.self_attn.q_proj.weight"
    assert_same_bytes(remote.multiply(key, x), twin.multiply(key, x))
    for part, data in twin.stored(key).items():
        assert_same_bytes(remote.stored(key)[part], data)
    remote.generate(requests_of(3))
    assert remote.cached_versions() <= {0}


def test_a_synchronization_through_buckets_of_any_size_is_proved_and_served():
    spec, plan = plan_of("dense", "nvfp4_all")
    snapshot = snapshot_of(spec, plan, 1, version=1)
    twin = engine_of("dense", "nvfp4_all")
    push(snapshot, twin)
    with serving(engine_of("dense", "nvfp4_all"), plan.digest) as url, connected(url, plan.digest) as remote:
        report = push(snapshot, remote, bucket_bytes=4097, order=3)
        assert remote.version == 1 and report.num_buckets > 4 and 0 < report.codes_changed_share <= 1
        assert_same_rollouts(remote.generate(requests_of(6)), twin.generate(requests_of(6)))
        remote.sleep()
        with pytest.raises(CapabilityError, match="sleeps"):
            remote.generate(requests_of(1))
        remote.wake()
        assert_same_rollouts(remote.generate(requests_of(6)), twin.generate(requests_of(6)))


def test_versions_only_grow():
    spec, plan = plan_of("dense", "mxfp8")
    with serving(engine_of("dense", "mxfp8"), plan.digest) as url, connected(url, plan.digest) as remote:
        push(snapshot_of(spec, plan, 1, version=5), remote)
        for version in (5, 4):
            with pytest.raises(SyncError, match="versions only grow") as caught:
                push(snapshot_of(spec, plan, 2, version=version), remote)
            assert caught.value.condition == "C7"
        assert remote.version == 5


def test_an_error_of_the_engine_arrives_as_the_same_error(pair):
    remote, twin, _ = pair
    bad = requests_of(1, max_new_tokens=1000)
    with pytest.raises(CapabilityError) as here:
        twin.generate(bad)
    with pytest.raises(CapabilityError) as there:
        remote.generate(bad)
    assert str(here.value) in str(there.value) and type(there.value) is type(here.value)
    with pytest.raises(SyncError) as caught:
        remote.digest(["nobody"])
    assert caught.value.condition == "C5" and caught.value.tensors == ("nobody",)


def test_another_plan_is_refused_at_the_first_word(pair):
    remote, _, _ = pair
    with pytest.raises(SyncError, match="start both with one recipe") as caught, connected(remote.url, "0" * 64):
        pass
    assert caught.value.condition == "C1"


def test_bits_are_promised_only_where_both_ends_compute_alike(pair, monkeypatch):
    remote, _, _ = pair
    assert remote.capabilities.bits
    monkeypatch.setattr("tests.sampler.served.BITS", {"device": "cuda", "torch": "the same"})
    with (
        pytest.warns(UserWarning, match="device: cpu there, cuda here"),
        connected(remote.url, remote.plan_digest) as other,
    ):
        assert not other.capabilities.bits


def test_requests_of_many_clients_run_together_and_none_is_changed_by_it():
    _, plan = plan_of("dense", "mxfp8")
    twin = engine_of("dense", "mxfp8")
    wanted = [requests_of(4, seed=seed) for seed in range(6)] + [requests_of(1, max_new_tokens=1000)]
    with serving(engine_of("dense", "mxfp8"), plan.digest) as url, connected(url, plan.digest) as remote:
        with ThreadPoolExecutor(7) as threads:
            answers = [threads.submit(remote.generate, requests) for requests in wanted]
        for requests, answer in zip(wanted[:-1], answers[:-1], strict=True):
            assert_same_rollouts(answer.result(), twin.generate(requests))
        with pytest.raises(CapabilityError):
            answers[-1].result()


def test_completions_of_the_openai_api_are_the_engines_own():
    _, plan = plan_of("dense", "mxfp8")
    twin = engine_of("dense", "mxfp8")
    with serving(engine_of("dense", "mxfp8"), plan.digest, model=openai_model()) as url:
        asked = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 7, "n": 2, "seed": 7, "logprobs": 0}
        answer = post(f"{url}/v1/completions", json=asked).json()
        requests = [
            r.__class__(prompt_index=0, sample=i, prompt_tokens=(1, 2, 3), seed=7, sampling=r.sampling)
            for i, r in enumerate(requests_of(2))
        ]
        for choice, rollout in zip(answer["choices"], twin.generate(requests), strict=True):
            assert choice["logprobs"]["token_ids"] == rollout.tokens_R.tolist()
            assert choice["logprobs"]["token_logprobs"] == rollout.logp_R.tolist()
            assert choice["version"] == 0 and choice["finish_reason"] == rollout.finish
        made = sum(len(c["logprobs"]["token_ids"]) for c in answer["choices"])
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": made, "total_tokens": 3 + made}
        listed = post(f"{url}/v1/completions", json={"prompt": ["ab", [1, 2]], "max_tokens": 2}).json()
        assert len(listed["choices"]) == 2
        assert [m["id"] for m in get(f"{url}/v1/models").json()["data"]] == ["tiny"]


@pytest.fixture(scope="module")
def openai_url():
    _, plan = plan_of("dense", "mxfp8")
    with serving(engine_of("dense", "mxfp8"), plan.digest, model=openai_model()) as url:
        yield url


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"prompt": "ab", "stream": True}, "stream"),
        ({"prompt": "ab", "logit_bias": {"3": 100}}, "logit_bias"),
        ({"prompt": "ab", "logprobs": 5}, "logprobs"),
        ({"prompt": "ab", "temprature": 1}, "temprature"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": "ab", "n": 0}, "n = 0"),
        ({"prompt": "ab", "n": 5000}, "5000"),
        ({"prompt": "ab", "temperature": "hot"}, "temperature"),
        ({"prompt": "ab", "stop": [1]}, "stop"),
        ({"prompt": "ab", "max_tokens": 0}, "max_new_tokens"),
        ({}, "prompt"),
    ],
    ids=str,
)
def test_what_the_openai_endpoint_cannot_do_is_refused_by_name(openai_url, asked, named):
    answer = post(f"{openai_url}/v1/completions", json=asked)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


def test_a_chat_goes_through_the_template_of_the_tokenizer_or_is_refused():
    _, plan = plan_of("dense", "mxfp8")
    messages = [{"role": "user", "content": "hi"}]
    template = openai_model(chat=lambda chat: "".join(m["content"] for m in chat) + ":")
    with serving(engine_of("dense", "mxfp8"), plan.digest, model=template) as url:
        asked = {"messages": messages, "max_tokens": 4, "seed": 1, "logprobs": True}
        answer = post(f"{url}/v1/chat/completions", json=asked).json()
        assert answer["usage"]["prompt_tokens"] == len("hi:")
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant" and choice["logprobs"]["content"]
    with serving(engine_of("dense", "mxfp8"), plan.digest, model=openai_model()) as url:
        answer = post(f"{url}/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 400 and "no chat template" in answer.text
