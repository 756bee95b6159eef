"""The embedded engine: a completion depends on its request and the weights, and on nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onegrid.errors import CapabilityError, ConfigError, NonFiniteError, SyncError
from onegrid.model.canonical import raw_bytes
from onegrid.sampler.base import Sampler
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sampler.fake import FakeSampler
from onegrid.types import Request, Rollout, Sampling
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import engine_of, loaded, plan_of, requests_of, snapshot_of
from tests.sync.toy import snapshot_of as toy_snapshot

PAIRS = [("dense", "bf16"), ("moe", "mxfp8"), ("moe", "nvfp4_experts"), ("dense", "fp8_block")]


def bytes_of(rollouts: list[Rollout]) -> list[torch.Tensor]:
    """Everything numeric of rollouts."""
    out = []
    for r in rollouts:
        out += [r.tokens_R, r.logp_R, r.version_R, *(r.kept or ())]
        out += [] if r.routing_RLE is None else [r.routing_RLE]
    return out


def letters(tokens: list[int]) -> str:
    """A character per token."""
    return "".join(chr(48 + token) for token in tokens)


@pytest.mark.parametrize(("model", "preset"), PAIRS)
def test_tokens_do_not_depend_on_slots_order_or_prefill(model, preset, device):
    requests = requests_of(18)
    expected = engine_of(model, preset, device=device).generate(requests)
    assert {r.finish for r in expected} == {"stop", "length"}
    assert [r.request for r in expected] == requests
    for config in (
        {"max_slots": 1, "prefix_tokens": 0},
        {"max_slots": 5, "prefill_tokens": 1},
        {"max_slots": 7, "prefill_tokens": 13, "prefix_tokens": 5, "max_len": 33},
    ):
        got = engine_of(model, preset, device=device, **config).generate(requests)
        assert_same_bytes(bytes_of(got), bytes_of(expected), str(config))
    order = [(5 * i) % 18 for i in range(18)]
    got = engine_of(model, preset, device=device, max_slots=6).generate([requests[i] for i in order])
    assert_same_bytes(bytes_of(got), bytes_of([expected[i] for i in order]))


def test_a_request_alone_gives_what_it_gives_among_others(device):
    engine = engine_of("moe", "mxfp8", device=device)
    requests = requests_of(9)
    together = engine.generate(requests)
    for request, rollout in list(zip(requests, together, strict=True))[::4]:
        assert_same_bytes(bytes_of(engine.generate([request])), bytes_of([rollout]))


def test_samplings_may_be_mixed_in_one_call():
    engine = engine_of("dense", "bf16")
    one, other = requests_of(4), requests_of(4, temperature=0.5, top_k=3)
    mixed = engine.generate([r for pair in zip(one, other, strict=True) for r in pair])
    assert_same_bytes(bytes_of(mixed[::2]), bytes_of(engine.generate(one)))
    assert_same_bytes(bytes_of(mixed[1::2]), bytes_of(engine.generate(other)))


@pytest.mark.parametrize(("model", "preset"), PAIRS)
def test_decoding_through_the_cache_equals_a_prefill_of_the_same_tokens(model, preset, device):
    engine = engine_of(model, preset, device=device)
    for rollout in engine.generate(requests_of(6, max_new_tokens=5))[::2]:
        tokens = rollout.tokens_R.tolist()
        prefixes = [[*rollout.request.prompt_tokens, *tokens[:at]] for at in range(len(tokens))]
        logp = torch.stack([p[t] for p, t in zip(engine.probe(prefixes), tokens, strict=True)])
        assert_same_bytes(rollout.logp_R, logp)


def test_samples_of_a_prompt_differ_and_repeat(device):
    engine = engine_of("moe", "mxfp8", device=device)
    requests = requests_of(6, samples=6, stop_token_ids=())
    first = engine.generate(requests)
    assert len({tuple(r.tokens_R.tolist()) for r in first}) > 1
    assert_same_bytes(bytes_of(engine.generate(requests)), bytes_of(first))
    again = engine.generate([replace(r, seed=8) for r in requests])
    assert [r.tokens_R.tolist() for r in again] != [r.tokens_R.tolist() for r in first]


def test_greedy_takes_the_most_likely_and_reports_it_at_temperature_one():
    engine = engine_of("dense", "bf16")
    greedy = engine.generate(requests_of(3, temperature=0.0, top_p=0.5))
    for rollout in greedy:
        assert rollout.kept is None
        logp_V = engine.probe([rollout.request.prompt_tokens])[0]
        assert int(rollout.tokens_R[0]) == int(logp_V.argmax())
        assert_same_bytes(rollout.logp_R[0], logp_V.max())
    first = engine.generate(requests_of(3, temperature=0.7, top_k=1))
    assert [r.tokens_R.tolist() for r in first] == [r.tokens_R.tolist() for r in greedy]
    assert all(bool((r.logp_R == 0).all()) for r in first), "one token is kept, so its probability is 1"


def test_kept_sets_are_recorded_per_token_or_truncation_is_refused(device):
    requests = requests_of(5, top_p=0.8, top_k=6, temperature=0.9)
    rollouts = engine_of("moe", "mxfp8", device=device, max_slots=2).generate(requests)
    for rollout in rollouts:
        assert rollout.kept is not None
        assert len(rollout.kept) == len(rollout.tokens_R)
        for token, ids in zip(rollout.tokens_R.tolist(), rollout.kept, strict=True):
            assert ids.dtype == torch.int64
            assert token in ids.tolist()
            assert 1 <= len(ids) <= 6
            assert ids.tolist() == sorted(ids.tolist())
    refusing = engine_of("moe", "mxfp8", kept="refuse")
    assert not refusing.capabilities.kept_set
    with pytest.raises(CapabilityError, match=r"top_p 0\.8 or top_k 6 truncates"):
        refusing.generate(requests)
    refusing.generate(requests_of(1))


def test_routing_is_that_of_the_position_that_drew_the_token():
    engine = engine_of("moe", "mxfp8", max_slots=3)
    plain = engine.generate(requests_of(6))
    rollouts = engine.generate(requests_of(6, record_routing=True))
    assert_same_bytes([r.tokens_R for r in rollouts], [r.tokens_R for r in plain])
    for rollout in rollouts:
        length = len(rollout.tokens_R)
        assert rollout.routing_RLE is not None
        assert rollout.routing_RLE.dtype == torch.int16
        assert tuple(rollout.routing_RLE.shape) == (length, 2, 2)
        prompt = (*rollout.request.prompt_tokens, *rollout.tokens_R[:-1].tolist())
        asked = replace(rollout.request, prompt_tokens=prompt)
        last = engine.generate([asked])[0].routing_RLE
        assert last is not None
        assert_same_bytes(rollout.routing_RLE[-1], last[0])
    with pytest.raises(CapabilityError, match="no experts"):
        engine_of("dense", "bf16").generate(requests_of(1, record_routing=True))


def test_stop_strings_end_a_completion_on_text():
    requests = requests_of(8, max_new_tokens=20, temperature=3.0, stop_token_ids=(), stop_strings=("1", "5", "AB"))
    spec, plan = plan_of("dense", "bf16")
    weights = loaded(snapshot_of(spec, plan, 0, version=0), spec, plan)
    engine = Engine(weights, SamplerConfig(max_slots=3, max_len=64), version=0, decode_text=letters)
    rollouts = engine.generate(requests)
    assert "stop" in {r.finish for r in rollouts}
    for r in rollouts:
        text = letters(r.tokens_R.tolist())
        assert any(stop in text for stop in ("1", "5", "AB")) == (r.finish == "stop")
        assert text.startswith(r.text)
        assert "1" not in r.text
        assert len(r.logp_R) == len(r.tokens_R)
    with pytest.raises(CapabilityError, match="stop strings need decode_text"):
        engine_of("dense", "bf16").generate(requests)


def test_nan_in_the_weights_is_an_error_that_names_the_request_and_leaves_no_trace():
    engine = engine_of("dense", "bf16")
    expected = engine.generate(requests_of(4))
    embedding = engine.weights.parts("model.embed_tokens.weight")["values"]
    kept = embedding.clone()
    embedding[requests_of(4)[3].prompt_tokens[-1]] = torch.nan
    engine.weights.derive()
    with pytest.raises(NonFiniteError, match=r"prompt \d, sample \d, response token \d+, weights of version 0"):
        engine.generate(requests_of(4))
    embedding.copy_(kept)
    engine.weights.derive()
    assert_same_bytes(bytes_of(engine.generate(requests_of(4))), bytes_of(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": ()}, "the prompt is empty"),
        ({"prompt_tokens": (1, 40)}, "outside the vocabulary of 40"),
        ({"prompt_tokens": (1,) * 60}, "60 prompt and up to 7 new tokens need 67 positions, a slot has 64"),
        ({"sampling": Sampling(temperature=-1)}, "temperature is -1"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature is nan"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p is 0.0"),
        ({"sampling": Sampling(max_new_tokens=0)}, "max_new_tokens is 0"),
        ({"sampling": Sampling(stop_strings=("",))}, "no empty string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_before_anything_runs(change, message):
    engine = engine_of("dense", "bf16")
    good = requests_of(1)[0]
    with pytest.raises(CapabilityError, match=message):
        engine.generate([good, replace(good, **change)])


def test_the_configuration_is_checked():
    for wrong in ({"max_slots": 0}, {"max_len": 0}, {"prefill_tokens": 0}, {"prefix_tokens": -1}, {"kept": "maybe"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SamplerConfig(**wrong)
    with pytest.raises(ConfigError, match="beyond the model's 128 positions"):
        engine_of("dense", "bf16", max_len=129)


def test_no_requests_give_no_rollouts():
    assert engine_of("dense", "bf16").generate([]) == []


def test_the_longest_completion_fills_its_slot_to_the_last_position():
    engine = engine_of("dense", "bf16", max_len=32)
    requests = [Request(prompt_index=0, sample=0, prompt_tokens=(1, 2), seed=0, sampling=Sampling(max_new_tokens=30))]
    assert len(engine.generate(requests)[0].tokens_R) == 30


def test_sleep_refuses_until_wake_has_proved_the_weights():
    engine = engine_of("moe", "mxfp8")
    expected = engine.generate(requests_of(4))
    engine.sleep()
    with pytest.raises(CapabilityError, match="sleeps"):
        engine.generate(requests_of(4))
    engine.wake()
    assert_same_bytes(bytes_of(engine.generate(requests_of(4))), bytes_of(expected))
    engine.sleep()
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    raw_bytes(engine.weights.parts(name)["scales"])[-1] ^= 1
    engine.weights.derive()
    with pytest.raises(SyncError, match=r"experts\.3\.down_proj") as caught:
        engine.wake()
    assert (caught.value.condition, caught.value.tensors) == ("C2", (name,))
    with pytest.raises(SyncError, match="synchronize first"):
        engine.generate(requests_of(4))


def test_an_fp8_cache_rounds_keys_and_values():
    spec, plan = plan_of("dense", "bf16")
    weights = loaded(snapshot_of(spec, plan, 0, version=0), spec, replace(plan, kv_cache="fp8"))
    engine = Engine(weights, SamplerConfig(max_slots=4, max_len=64), version=0)
    rollouts = engine.generate(requests_of(4))
    assert engine.cache is not None
    values = engine.cache.values[0].float()
    assert_same_bytes(values, values.to(torch.float8_e4m3fn).float())
    logp = engine.probe([r.request.prompt_tokens for r in rollouts])
    assert_same_bytes([r.logp_R[0] for r in rollouts], [p[r.tokens_R[0]] for p, r in zip(logp, rollouts, strict=True)])
    assert logp[0].tolist() != engine_of("dense", "bf16").probe([rollouts[0].request.prompt_tokens])[0].tolist()


def test_every_tensor_is_described_from_its_storage():
    engine = engine_of("moe", "mxfp8")
    live = engine.describe()
    assert list(live) == engine.weights.names()
    expert = live["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert (expert.format, expert.shape) == ("mxfp8", (32, 64))
    assert "row 3" in expert.layout
    assert live["model.norm.weight"].format == "bf16"
    assert live["model.layers.0.mlp.gate.weight"].format == "bf16"


def test_engine_and_fake_follow_the_protocol():
    engine, fake = engine_of("moe", "bf16"), FakeSampler(toy_snapshot(0, 0))
    assert isinstance(engine, Sampler)
    assert isinstance(fake, Sampler)
    assert engine.capabilities.routing
    assert not engine_of("dense", "bf16").capabilities.routing
    with pytest.raises(CapabilityError, match="no captured graphs"):
        engine.probe([[1]], captured=True)
