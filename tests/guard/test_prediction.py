"""Pairings that are not exact: the sentinel's expectation is a replay of the same tokens on the plan's grids."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onegrid.errors import ConfigError
from onegrid.guard.chart import Detector, contrast
from onegrid.guard.config import GuardConfig
from onegrid.guard.guard import check_step, guard_of
from onegrid.guard.inject_state import cache_grid, other_epsilon
from onegrid.guard.injection import Bench
from onegrid.guard.prediction import chosen
from onegrid.guard.verdict import FailedChecks
from onegrid.mismatch.metrics import compare
from onegrid.recipe.exactness import reasons_of
from onegrid.rl.loop import snapshot
from onegrid.sampler.engine import Engine
from onegrid.study.corruptions import update
from onegrid.study.pairing import make_bench
from onegrid.sync import push
from onegrid.types import Batch, Request, Sampling
from tests.sync.test_learner_pairing import batch_of


class Foreign(Engine):
    """An engine that promises no bits, as one of other people does not: its log-probabilities carry some noise."""

    noise = 0.0

    @property
    def capabilities(self):
        """Without the promise."""
        return dataclasses.replace(super().capabilities, bits=False)

    def generate(self, requests, on_finished=None):
        """With noise, of the size that roundings leave."""
        generator = torch.Generator().manual_seed(self.version)
        return [
            dataclasses.replace(r, logp_R=r.logp_R + self.noise * torch.randn(r.logp_R.shape, generator=generator))
            for r in super().generate(requests, on_finished)
        ]


def foreign(model: str = "moe", preset: str = "mxfp8", *, noise: float = 0.0) -> Bench:
    """A bench with such an engine."""
    bench = make_bench(model, preset)
    bench.sampler.__class__, bench.sampler.noise = Foreign, noise
    return bench


def mixed(bench: Bench) -> Bench:
    """The sampler of the plan is BF16 throughout."""
    plan = bench.learner.plan
    tensors = {n: dataclasses.replace(t, sampler_weight=None, sampler_activation=None) for n, t in plan.tensors.items()}
    reasons = reasons_of(tensors.values(), kv_cache=plan.kv_cache, learner_kv=plan.learner_kv)
    plan = dataclasses.replace(plan, tensors=tensors, exact=False, reasons=reasons)
    bench.learner.adopt(plan)
    bench.sampler.adopt(plan)
    return bench


def step(bench: Bench, guard, seed: int):
    """A version into the sampler, a batch of ten prompts from it, and the verdict of the sentinel."""
    push(snapshot(bench.learner), bench.sampler)
    asked = Sampling(max_new_tokens=6)
    batch = batch_of(
        bench.sampler.generate(
            [
                Request(prompt_index=i, sample=0, prompt_tokens=(3, 4 + i, 5 + seed), seed=seed, sampling=asked)
                for i in range(10)
            ]
        )
    )
    batch = Batch(sequences=tuple(dataclasses.replace(s, group_id=i) for i, s in enumerate(batch.sequences)))
    logp = bench.learner.log_probs(batch)
    apart = compare(logp, [s.sampler_logp_R for s in batch.sequences], [s.mask_R for s in batch.sequences])
    try:
        verdicts = check_step(guard, apart, batch, learner=bench.learner, logp=logp)
        return next(v for v in verdicts if v.check == "sentinel")
    except FailedChecks as error:
        return error.verdicts[0]
    finally:
        update(bench, seed)


def test_a_mixed_pairing_is_held_to_the_bits_of_its_replay():
    bench = mixed(make_bench())
    guard = guard_of(GuardConfig(replay_every=1), bench.learner, bench.sampler)
    assert not guard.sentinel.exact
    verdicts = [step(bench, guard, seed) for seed in range(2)]
    assert all(v.passed and "by replay" in v.found for v in verdicts)
    assert "k3 0 measured" not in verdicts[0].found  # there is a mismatch, and it is the expected one
    bench.at = 2
    other_epsilon(bench)  # moves log-probabilities by less than the mismatch that is expected
    found = step(bench, guard, 2)
    assert found.status == "failed" and found.condition == "C6" and "by replay" in found.found


@pytest.mark.parametrize(("preset", "noise"), [("mxfp8", 3e-3)])
def test_an_engine_without_bits_is_quiet_within_what_roundings_make(preset, noise):
    bench = foreign(preset=preset, noise=noise)
    guard = guard_of(GuardConfig(replay_every=1), bench.learner, bench.sampler)
    verdicts = [step(bench, guard, seed) for seed in range(3)]
    assert all(v.passed and "allowed" in v.found for v in verdicts)
    assert guard.watch.detector.capital["replay"] == 0.0


def test_an_engine_with_a_cache_in_fp8_is_found_though_it_promises_no_bits():
    bench = foreign(preset="bf16", noise=3e-3)
    guard = guard_of(GuardConfig(replay_every=1), bench.learner, bench.sampler)
    assert step(bench, guard, 0).passed
    bench.at = 1
    cache_grid(bench)
    verdicts = [step(bench, guard, seed) for seed in range(1, 5)]
    assert verdicts[-1].status == "failed" and verdicts[-1].condition == "C6"
    assert "nats from the replay" in verdicts[-1].found


def test_scales_of_a_whole_batch_leave_open_what_a_replay_one_by_one_measures():
    bench = make_bench("tied", "fp8_tensor")
    guard = guard_of(GuardConfig(replay_every=1), bench.learner, bench.sampler)
    assert all(step(bench, guard, seed).passed for seed in range(2))


def test_a_replay_has_its_turn_and_is_kept_over_a_resume():
    bench = foreign(noise=3e-3)
    guard = guard_of(GuardConfig(replay_every=2), bench.learner, bench.sampler)
    found = [step(bench, guard, seed).found for seed in range(3)]
    assert ["not its turn" in text for text in found] == [False, True, False]
    other = guard_of(GuardConfig(replay_every=2), bench.learner, bench.sampler)
    other.watch.load_state(guard.watch.state())
    assert step(bench, other, 3).found == f"not its turn; at version 2: {found[2]}"


def test_sequences_of_a_replay_are_of_as_many_prompts_as_there_are():
    bench = make_bench()
    push(snapshot(bench.learner), bench.sampler)
    asked = Sampling(max_new_tokens=2)
    requests = [
        Request(prompt_index=i, sample=k, prompt_tokens=(3, 4 + i), seed=0, sampling=asked)
        for i in range(3)
        for k in range(4)
    ]
    batch = batch_of(bench.sampler.generate(requests))
    batch = Batch(sequences=tuple(dataclasses.replace(s, group_id=i // 4) for i, s in enumerate(batch.sequences)))
    for turn in range(4):
        picked = chosen(batch, 5, turn=turn)
        assert len(picked) == len(set(picked)) == 5
        assert {i // 4 for i in picked[:3]} == {0, 1, 2}
    assert chosen(batch, 99, turn=0) and len(chosen(batch, 99, turn=1)) == 12


def test_a_detector_is_right_less_than_once_in_its_run_length_and_finds_a_difference():
    generator = torch.Generator().manual_seed(0)
    detector = Detector(1000.0)
    x = torch.randn(20_000, 4, generator=generator).square()
    y = torch.randn(20_000, 4, generator=generator).square()
    healthy = [detector.add("a", map(contrast, a, b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert sum(healthy) <= 20_000 / 1000
    alarms = [
        detector.add("b", map(contrast, [30 * v for v in a], b))
        for a, b in zip(x[:30].tolist(), y.tolist(), strict=False)
    ]
    assert alarms.index(True) < 12
    assert contrast(0.0, 0.0) == 0.0 and contrast(1.0, 0.0) == 1.0
    with pytest.raises(ConfigError, match="within -1 and 1"):
        detector.add("c", [float("nan")])


def test_traces_are_refused_where_a_sampler_shows_no_layers():
    bench = make_bench()
    guard_of(GuardConfig(traces=True), bench.learner, bench.sampler)
    with pytest.raises(ConfigError, match=r"guard\.traces"):
        guard_of(GuardConfig(traces=True, replay_every=1), bench.learner, NoTrace(bench.sampler))
    with pytest.raises(ConfigError, match="replay_band"):
        GuardConfig(replay_band=0.0)


class NoTrace:
    """A sampler of other people."""

    def __init__(self, sampler):
        self.capabilities = sampler.capabilities
