"""Tokens of a real engine: their log-probabilities are those that an independent FP32 model gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onegrid.errors import CapabilityError, ConfigError, SyncError
from onegrid.sampler.vllm import versions
from onegrid.sampler.vllm.config import VllmConfig
from onegrid.types import Request, Sampling
from tests.sampler.tiny import requests_of
from tests.vllm.engines import MODELS, numbers, start

pytestmark = pytest.mark.filterwarnings("ignore")


def oracle(running, snapshot):
    """transformers, in FP32, with the decoded weights of a snapshot."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.AutoConfig.for_model(**running.hf_config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    state = {name: numbers(tensor).float() for name, tensor in snapshot.tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.eval()


@torch.no_grad()
def expected_logp(model, rollout):
    """FP32 log-probability of every token of a rollout at its temperature."""
    prompt = list(rollout.request.prompt_tokens)
    tokens = torch.tensor([prompt + rollout.tokens_R.tolist()])
    logits_TV = model(tokens).logits[0].double() / (rollout.request.sampling.temperature or 1.0)
    logp_TV = logits_TV.log_softmax(-1)
    at = torch.arange(len(prompt) - 1, tokens.shape[1] - 1)
    return logp_TV[at, rollout.tokens_R].float()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5, 0.0])
def test_log_probs_are_those_of_the_sampling_temperature(dense, temperature):
    snapshot = dense.snapshot()
    dense.push(snapshot)
    model = oracle(dense, snapshot)
    rollouts = dense.sampler.generate(requests_of(12, temperature=temperature))
    apart = torch.cat([(r.logp_R - expected_logp(model, r)).abs() for r in rollouts])
    # logits of a few units in FP32 through two layers: sums of up to 128 terms, each within 128 * 2^-24 of its size
    assert len(apart) > 40 and float(apart.max()) < 1e-4


def test_several_requests_come_back_in_order_with_seeds_of_their_own(dense):
    requests = requests_of(12, samples=4)
    together = dense.sampler.generate(requests)
    assert [r.request for r in together] == requests
    alone = [dense.sampler.generate([request])[0] for request in reversed(requests)][::-1]
    assert [r.tokens_R.tolist() for r in together] == [r.tokens_R.tolist() for r in alone]
    assert len({tuple(r.tokens_R.tolist()) for r in together[:4]}) > 1, "samples of one prompt differ"


def test_every_token_carries_the_version_that_made_it(dense):
    for _ in range(2):
        version = dense.push().version
        for rollout in dense.sampler.generate(requests_of(3)):
            assert rollout.version_R.tolist() == [version] * len(rollout.tokens_R)


def test_stop_tokens_are_kept_once_and_name_the_finish(dense):
    rollouts = dense.sampler.generate(requests_of(24, samples=6, max_new_tokens=20, stop_token_ids=(3, 5, 7, 11)))
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for r in rollouts:
        assert len(r.tokens_R) == len(r.logp_R)
        hits = [t in (3, 5, 7, 11) for t in r.tokens_R.tolist()]
        assert hits == [False] * (len(hits) - 1) + [r.finish == "stop"]
        assert r.finish == "stop" or len(hits) == 20


def test_finished_rollouts_are_told(dense):
    told = []
    rollouts = dense.sampler.generate(requests_of(3), told.append)
    assert told == rollouts


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"top_p": 0.9}, "kept set"),
        ({"top_k": 4}, "kept set"),
        ({"stop_strings": ("x",)}, "stop strings"),
        ({"record_routing": True}, "routing"),
        ({"max_new_tokens": 500}, "positions"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_runs(dense, sampling, said):
    with pytest.raises(CapabilityError, match=said):
        dense.sampler.generate(requests_of(1, **sampling))


def test_prompts_that_cannot_be_are_refused(dense):
    for prompt in ((), (40,), (-1,)):
        request = Request(prompt_index=0, sample=0, prompt_tokens=prompt, seed=0, sampling=Sampling())
        with pytest.raises(CapabilityError, match="prompt 0, sample 0"):
            dense.sampler.generate([request])
    assert dense.sampler.generate([]) == []


def test_raw_log_probs_are_for_temperature_one_only(dense):
    config = dense.sampler.config
    dense.sampler.config = dataclasses.replace(config, logprobs="raw")
    try:
        with pytest.raises(CapabilityError, match=r"temperature 1, not 0\.5"):
            dense.sampler.generate(requests_of(1, temperature=0.5))
    finally:
        dense.sampler.config = config


def test_probe_gives_the_whole_distribution_and_does_not_serve(dense):
    dense.push()  # a second version, so that there is one to go back to
    answer = dense.sampler.probe([(1, 2, 3), (4, 5)])
    assert [tuple(x.shape) for x in answer] == [(40,), (40,)]
    assert all(abs(float(x.exp().sum()) - 1) < 1e-5 for x in answer)
    before = dense.sampler.version
    dense.sampler.abort()  # nothing was generated since the commit, so it can be undone
    assert dense.sampler.version != before
    with pytest.raises(CapabilityError, match="no graphs"):
        dense.sampler.probe([(1,)], captured=True)


@torch.no_grad()
def test_probe_gives_the_log_probs_of_an_independent_model_also_from_the_prefix_cache(dense):
    snapshot = dense.snapshot()
    dense.push(snapshot)
    model = oracle(dense, snapshot)
    prompts = [tuple((5 * i + start) % 40 for i in range(70)) for start in range(2)] + [(7,)]
    answers = dense.sampler.probe(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert answer.dtype == torch.float32 and float((answer - expected).abs().max()) < 1e-4
    again = dense.sampler.probe(prompts)  # 64 of 70 tokens are found; the last positions are computed anew
    assert all(float((x - y).abs().max()) < 1e-4 for x, y in zip(answers, again, strict=True))


def test_probe_leaves_the_model_as_it_was_also_when_it_fails(dense, monkeypatch):
    model, left = dense.inside.model, dense.sampler.store.folder / "exchange"

    def fails(*arguments, **named):
        assert "compute_logits" in vars(model)
        raise ValueError("out of order")

    dense.sampler.probe([(1, 2)])
    assert "compute_logits" not in vars(model) and not left.exists()
    with monkeypatch.context() as patched:
        patched.setattr(dense.sampler.engine.engine, "generate", fails)
        with pytest.raises(CapabilityError, match="ValueError: out of order"):
            dense.sampler.probe([(3, 4)])
    assert "compute_logits" not in vars(model) and not left.exists()
    assert dense.sampler.probe([(3, 4)])[0].isfinite().all()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_fails_within_the_model_leaves_nothing_that_the_next_one_waits_for(dense, monkeypatch, error):
    def fails(*arguments, **named):
        raise error("out of order")

    expected = [r.tokens_R.tolist() for r in dense.sampler.generate(requests_of(3))]
    with monkeypatch.context() as patched:
        patched.setattr(type(dense.inside.model), "compute_logits", fails)
        for call in (lambda: dense.sampler.generate(requests_of(3)), lambda: dense.sampler.probe([(3, 4)])):
            with pytest.raises((CapabilityError, error), match="out of order"):
                call()
    assert [r.tokens_R.tolist() for r in dense.sampler.generate(requests_of(3))] == expected
    assert "compute_logits" not in vars(dense.inside.model)


def test_probe_refuses_an_engine_that_samples_from_other_numbers_than_its_model_computes(dense, monkeypatch):
    sampler = dense.sampler.engine.engine.collective_rpc(lambda worker: worker.model_runner.sampler)[0]
    forward = sampler.forward
    monkeypatch.setattr(sampler, "forward", lambda logits, *rest, **named: forward(logits * 1.5, *rest, **named))
    with pytest.raises(SyncError, match=r"token \d+ has log-probability .* by the engine") as told:
        dense.sampler.probe([(1, 2, 3)])
    assert told.value.condition == "C4"


def test_nothing_is_served_before_a_version_is_proved_and_raw_log_probs_are_right_at_temperature_one():
    running = start("dense", "bf16", dtype="float32", logprobs="raw")
    try:
        with pytest.raises(SyncError, match="synchronize first"):
            running.sampler.generate(requests_of(1))
        snapshot = running.snapshot()
        running.push(snapshot)
        model = oracle(running, snapshot)
        for rollout in running.sampler.generate(requests_of(4)):
            assert float((rollout.logp_R - expected_logp(model, rollout)).abs().max()) < 1e-4
    finally:
        running.sampler.close()


def test_unknown_versions_are_refused_unless_told(monkeypatch):
    monkeypatch.setattr(versions.metadata, "version", lambda package: "9.9.9+cpu")
    with pytest.raises(CapabilityError, match=r"vLLM 9\.9\.9 is unknown"):
        versions.check(allow_unknown=False)
    assert versions.check(allow_unknown=True) == "9.9.9"


def test_a_plain_engine_refuses_a_plan_with_quantized_activations():
    with pytest.raises(CapabilityError, match="sampler_activation"):
        start("dense", "mxfp8", inputs=True)
    with pytest.raises(ConfigError, match="emulate"):
        VllmConfig(emulate=True, apart=True)
    with pytest.raises(CapabilityError, match="ignores sleep on a CPU"):
        start("dense", "bf16", sleep_level=1)
    assert MODELS["dense"]["tie_word_embeddings"]
