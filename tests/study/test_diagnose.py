"""A sampler that differs in one thing on purpose: the diagnosis names that thing, and where it comes in."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onegrid.formats import QUANTIZERS
from onegrid.guard.inject_state import cache_grid
from onegrid.guard.injection import Bench
from onegrid.guard.replay import weights_of
from onegrid.model.canonical import Snapshot
from onegrid.model.live import LiveWeights
from onegrid.ops.linear import matmul
from onegrid.ops.routing import route
from onegrid.study import diagnose as causes
from onegrid.study.corruptions import update
from onegrid.study.diagnose import diagnose
from onegrid.study.pairing import make_bench
from onegrid.sync import push
from onegrid.types import Request, Sampling
from tests.sync.test_learner_pairing import batch_of


def snapshot(bench: Bench) -> Snapshot:
    """The learner's version, in storage of its own."""
    tensors = {
        name: t.clone() if isinstance(t, torch.Tensor) else dataclasses.replace(
            t, codes=t.codes.clone(), scales=t.scales.clone(), amax=None if t.amax is None else t.amax.clone()
        )
        for name, t in bench.learner.canonical().items()
    }  # fmt: skip
    return Snapshot(version=bench.learner.version, plan_digest=bench.learner.plan.digest, tensors=tensors)


def rollouts(bench: Bench, **sampling):
    """Some completions."""
    asked = Sampling(max_new_tokens=6, **sampling)
    return bench.sampler.generate(
        [Request(prompt_index=i, sample=0, prompt_tokens=(3, 4 + i, 5), seed=0, sampling=asked) for i in range(6)]
    )


def synced(model: str = "moe") -> Bench:
    """A bench whose sampler has version 0."""
    bench = make_bench(model)
    push(snapshot(bench), bench.sampler)
    return bench


def test_equal_sides_are_called_one_policy():
    bench = synced()
    found = diagnose(bench.learner, bench.sampler, batch_of(rollouts(bench)))
    assert (found.before.share_equal, found.cause, found.places) == (1.0, None, ())
    assert "one policy" in found.lines()[-1]


def test_weights_of_another_grid_are_named_with_the_linear_where_they_come_in():
    bench = synced()
    key = "model.layers.1.self_attn.o_proj.weight"
    held = bench.sampler.weights.held[key]
    held.scales.add_(1)
    bench.sampler.weights.derive()
    found = diagnose(bench.learner, bench.sampler, batch_of(rollouts(bench)))
    assert found.cause is not None and found.cause.name == causes.WEIGHTS
    assert found.cause.left.share_equal == 1.0 and found.together.share_equal == 1.0
    assert found.places[0].name == key and found.places[0].relative == pytest.approx(1.0, rel=1e-2)


def test_a_mixed_pairing_is_split_into_weights_and_activations():
    bench = synced()
    planned = bench.learner.plan.tensors.items()
    tensors = {name: dataclasses.replace(t, sampler_weight=None, sampler_activation=None) for name, t in planned}
    mixed = dataclasses.replace(bench.learner.plan, tensors=tensors, exact=False, reasons=("mixed",))
    bench.learner.adopt(mixed)
    bench.sampler.adopt(mixed)
    push(snapshot(bench), bench.sampler)
    found = diagnose(bench.learner, bench.sampler, batch_of(rollouts(bench)))
    assert {c.name for c in found.causes[:2]} == {causes.WEIGHTS, causes.ACTIVATIONS}
    assert found.together.share_equal == 1.0 and found.before.share_equal < 1
    assert found.places[0].name == "model.layers.0.self_attn.q_proj.weight"


def test_activations_on_another_grid_are_named():
    bench = synced()
    for key in bench.sampler.weights.activation:
        if key.endswith("down_proj.weight"):
            bench.sampler.weights.activation[key] = QUANTIZERS["mxfp8_floor"]
    found = diagnose(bench.learner, bench.sampler, batch_of(rollouts(bench)))
    assert found.cause is not None and found.cause.name == causes.ACTIVATIONS
    assert found.places[0].name.endswith("down_proj.weight")


def test_a_cache_in_fp8_in_the_sampler_alone_is_named_and_comes_in_at_the_first_attention():
    bench = synced()
    cache_grid(bench)
    bench.at = 0
    found = diagnose(bench.learner, bench.sampler, batch_of(rollouts(bench)))
    assert found.cause is not None and found.cause.name == causes.CACHE
    assert found.cause.left.share_equal == 1.0
    assert found.places[0].name == "model.layers.0.self_attn"


def test_a_stale_version_is_named():
    bench = synced()
    older = weights_of(bench.learner, snapshot(bench).tensors)
    batch = batch_of(rollouts(bench))
    update(bench, 1)
    push(snapshot(bench), bench.sampler)
    found = diagnose(bench.learner, bench.sampler, batch, older=older)
    assert found.cause is not None and found.cause.name == causes.STALENESS
    assert found.cause.left.share_equal == 1.0


class OtherOrder(LiveWeights):
    """Adds the two halves of K, the first rounded to BF16 before: what a split sum with a small workspace does."""

    def linear(self, keys, x, dispatch=None, *, sent=False):
        """Dense linears in two parts; the rest as it is."""
        if dispatch is not None:
            return super().linear(keys, x, dispatch, sent=sent)
        a, half = self.input_operand(keys[0], x), x.shape[-1] // 2
        out = []
        for key in keys:
            parts = [
                matmul(
                    dataclasses.replace(a, values=a.values[..., at].contiguous()),
                    dataclasses.replace(self.read(key), values=self.read(key).values[..., at].contiguous()),
                    out_dtype=torch.float32,
                )
                for at in (slice(half), slice(half, None))
            ]
            out.append((parts[0].to(torch.bfloat16) + parts[1]).to(torch.bfloat16))
        return out


def test_another_order_of_sums_is_named():
    bench = synced("tied")
    bench.sampler.weights.__class__ = OtherOrder
    found = diagnose(bench.learner, bench.sampler, batch_of(rollouts(bench)))
    assert found.before.share_equal < 1
    assert found.cause is not None and found.cause.name == causes.SUMS
    assert found.cause.left.share_equal == 1.0


def test_a_sampler_that_visits_other_experts_is_named_where_it_recorded_them(monkeypatch):
    def other(x_ND, router_ED, *, top_k, normalize, forced_NK=None):
        """The third instead of the second expert, for every other row: how an engine breaks what it takes for ties."""
        found_NK = route(x_ND, router_ED, top_k=top_k + 1, normalize=normalize)[0]
        taken_NK = found_NK[:, :top_k].clone()
        taken_NK[::2, -1] = found_NK[::2, -1]
        expert_NK, weight_NK, _ = route(x_ND, router_ED, top_k=top_k, normalize=normalize, forced_NK=taken_NK)
        return expert_NK, weight_NK, expert_NK

    bench = synced()
    asked = Sampling(max_new_tokens=6, record_routing=True)
    requests = [Request(prompt_index=i, sample=0, prompt_tokens=(3 + i,), seed=0, sampling=asked) for i in range(6)]
    with monkeypatch.context() as patch:
        weights = bench.sampler.weights
        patch.setattr(weights, "kernels", dataclasses.replace(weights.kernels, route=other))
        batch = batch_of(bench.sampler.generate(requests))  # prompts of one token, so that all experts are recorded
    found = diagnose(bench.learner, bench.sampler, batch)
    assert found.before.share_equal < 1
    assert found.cause is not None and found.cause.name == causes.ROUTING
    assert found.cause.left.share_equal == 1.0
    assert "other experts" in "".join(found.lines())
    healthy = batch_of(bench.sampler.generate(requests))
    assert diagnose(bench.learner, bench.sampler, healthy).cause is None


def test_a_kept_set_that_the_learner_does_not_know_is_named():
    bench = synced()
    made = rollouts(bench, top_p=0.6)
    batch = batch_of(made)
    without = dataclasses.replace(batch, sequences=tuple(dataclasses.replace(s, kept=None) for s in batch.sequences))
    found = diagnose(bench.learner, bench.sampler, without, kept=[r.kept for r in made])
    assert found.cause is not None and found.cause.name == causes.TRUNCATION
    assert found.cause.left.share_equal == 1.0
    assert diagnose(bench.learner, bench.sampler, batch).before.share_equal == 1.0


def test_an_inexact_pairing_is_calibrated_at_fixed_weights_and_its_sentinel_tells_a_worse_one(tmp_path):
    from onegrid.guard.config import GuardConfig
    from onegrid.guard.guard import guard_of
    from onegrid.guard.sentinel import save_expectation
    from onegrid.rl.characters import CharacterTokenizer
    from onegrid.study.calibration import batches, measure
    from onegrid.study.pairing import Sums

    bench = make_bench("tied", "fp8_tensor")
    task = Sums(CharacterTokenizer(), num_prompts=2, seed=0, digits=1)
    drawn = batches(task, bench.sampler, samples=2, seed=0, sampling=Sampling(max_new_tokens=4))
    found = measure(bench.learner, bench.sampler, drawn, 20, model="tied")
    path = tmp_path / "calibration.json"
    save_expectation(found, path)
    guard = guard_of(GuardConfig(calibration=str(path)), bench.learner, bench.sampler)
    assert found.plan_digest == bench.learner.plan.digest and found.mean["mismatch/max_abs"] > 0
    healthy = dict(found.mean) | {"mismatch/share_equal": 0.0}
    assert all(guard.sentinel.judge(healthy).passed for _ in range(50))
    worse = {k: m + 3 * found.deviation[k] for k, m in found.mean.items()} | {"mismatch/share_equal": 0.0}
    assert [guard.sentinel.judge(worse).passed for _ in range(8)][-1] is False


def test_a_pairing_that_is_not_in_order_is_not_calibrated():
    from onegrid.guard.verdict import FailedChecks
    from onegrid.rl.characters import CharacterTokenizer
    from onegrid.study.calibration import batches, measure
    from onegrid.study.pairing import Sums

    bench = make_bench("tied", "fp8_tensor")
    bench.sampler.describe = lambda: {}
    task = Sums(CharacterTokenizer(), num_prompts=2, seed=0, digits=1)
    drawn = batches(task, bench.sampler, samples=2, seed=0, sampling=Sampling(max_new_tokens=4))
    with pytest.raises(FailedChecks, match="not in order"):
        measure(bench.learner, bench.sampler, drawn, 20, model="tied")
