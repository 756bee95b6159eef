"""All checks at every synchronization; they fail closed, and the configuration says what a failure does."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from onegrid.errors import CapabilityError, ConfigError, RecipeError
from onegrid.formats import QUANTIZERS, quantize
from onegrid.guard.audit import audit
from onegrid.guard.byte_comparison import stale_transposes
from onegrid.guard.config import CHECKS, GuardConfig
from onegrid.guard.fallback import with_bf16
from onegrid.guard.freshness import fresh_sampler, fresh_tokens
from onegrid.guard.guard import check_step, guard_of, keep_in_bf16
from onegrid.guard.inject_learner import both_sides_forget
from onegrid.guard.injection import after_derive, after_load, wrap
from onegrid.guard.selfcheck import linears
from onegrid.guard.sentinel import WATCHED, Expectation
from onegrid.guard.turns import due, turns
from onegrid.guard.verdict import FailedChecks, closed, passed
from onegrid.learner.grid_linear import Site
from onegrid.ops.native import native_operand_of, transposed
from onegrid.ops.operand import Operand
from onegrid.study.corruptions import whole
from onegrid.types import Batch, Request, Sampling
from tests.bytes import assert_same_bytes
from tests.guard.pair import Pair
from tests.sync.test_learner_pairing import batch_of

DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def rollouts(pair: Pair):
    """A few completions."""
    sampling = Sampling(max_new_tokens=3)
    return pair.sampler.generate(
        [Request(prompt_index=i, sample=0, prompt_tokens=(3, 4, 5), seed=0, sampling=sampling) for i in range(4)]
    )


def flip(pair: Pair, name: str = DOWN, *, times: int = 10**9) -> None:
    """The next syncs find one changed byte in a tensor."""
    left = [times]

    def act() -> None:
        if left[0] > 0 and pair.learner.plan[name].weight:
            left[0] -= 1
            pair.sampler.weights.parts(name)["codes"][0, 5] ^= 1

    pair.bench.at = pair.learner.version
    after_load(pair.bench, act)


@pytest.mark.parametrize(("model", "preset"), [("moe", "mxfp8"), ("tied", "fp8_tensor"), ("moe", "nvfp4_experts")])
def test_healthy_synchronizations_pass_every_check(model, preset):
    pair = Pair(model, preset, unknown="record", probe_every=1)
    for seed in range(2):
        pair.update(seed)
        report = pair.sync()
        assert {v.check for v in report.verdicts} == set(CHECKS) - {"sentinel"}
        assert all(v.passed for v in report.verdicts)
        assert set(report.metrics().values()) == {1}


def test_the_page_names_condition_tensor_row_block_bytes_values_cause_and_what_to_do():
    pair = Pair()
    pair.sync()
    pair.update()
    flip(pair)
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    verdict = next(v for v in caught.value.verdicts if v.check == "digest")
    assert (caught.value.condition, verdict.tensors) == ("C2", (DOWN,))
    page = str(caught.value)
    for word in ("C2", DOWN, "row 0, block 0, column 5: byte 0x", "expected 0x", "one byte of its codes", "do  ",
                 "version 0 keeps serving"):  # fmt: skip
        assert word in page
    assert whole(pair.bench, 0)


def test_a_refused_version_leaves_the_tokens_of_the_one_before():
    pair = Pair()
    pair.sync()
    before = rollouts(pair)
    pair.update()
    flip(pair, times=1)
    with pytest.raises(FailedChecks):
        pair.sync()
    after = rollouts(pair)
    assert_same_bytes([r.logp_R for r in after], [r.logp_R for r in before])
    pair.sync()
    assert {int(v) for r in rollouts(pair) for v in r.version_R} == {1}


def test_resend_helps_once_and_is_recorded():
    pair = Pair(on_failure="resend")
    pair.sync()
    pair.update()
    flip(pair, times=1)
    report = pair.sync()
    assert report.sync.version == 1 and "sent again" in report.action
    assert report.failures[0].tensors == (DOWN,)
    pair.update()
    flip(pair)
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert "second time" in caught.value.__notes__[0]


def test_bf16_keeps_the_named_tensors_and_their_group_on_both_sides_and_goes_on_exact():
    pair = Pair(on_failure="bf16")
    pair.sync()
    pair.update()
    flip(pair)
    report = pair.sync()
    group = [n for n in pair.learner.plan.tensors if "layers.1" in n and n.endswith("down_proj.weight")]
    assert pair.guard.bf16 == group and DOWN in report.action
    assert {pair.sampler.describe()[name].format for name in group} == {"bf16"}
    assert pair.sampler.describe()[group[0].replace("down", "up")].format == "mxfp8"
    batch = batch_of(rollouts(pair))
    assert_same_bytes(pair.learner.log_probs(batch), [s.sampler_logp_R for s in batch.sequences])
    with pytest.raises(RecipeError, match="is quantized; BF16 would change nothing"):
        with_bf16(pair.learner.plan, ["model.norm.weight"])


@pytest.mark.parametrize(
    ("check", "method", "answer"),
    [
        ("audit", "describe", {}),
        ("audit", "describe", None),
        ("digest", "digest", {}),
        ("digest", "digest", None),
        ("storage", "reads", None),
        ("selfcheck", "multiply", None),
        ("probe", "probe", []),
        ("probe", "probe", None),
        ("freshness", "cached_versions", None),
    ],
)
def test_an_answer_that_is_not_understood_stops_unless_the_check_is_off(check, method, answer):
    pair = Pair()
    wrap(pair.sampler, method, lambda original, *arguments: answer)
    if method == "digest":  # asked where the sampler does not show its operands
        wrap(pair.sampler, "operands", lambda original: None)
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert check in {v.check for v in caught.value.verdicts}
    pair.guard = dataclasses.replace(pair.guard, config=GuardConfig(off=(check,)))
    assert check not in {v.check for v in pair.sync().verdicts}


def test_a_sampler_that_cannot_be_asked_could_not_tell_and_may_only_be_recorded_when_told_so():
    pair = Pair(unknown="record")

    def refuse(original, *arguments):
        raise CapabilityError("this engine has no access to its storage")

    wrap(pair.sampler, "multiply", refuse)
    report = pair.sync()
    assert report.metrics()["guard/selfcheck"] == -1
    strict = Pair()
    wrap(strict.sampler, "multiply", refuse)
    with pytest.raises(FailedChecks, match="could not tell"):
        strict.sync()


def test_an_inexact_pairing_without_expectation_refuses_to_start():
    pair = Pair("tied", "fp8_tensor", off=("sentinel",))
    with pytest.raises(ConfigError, match=r"guard\.calibration"):
        guard_of(GuardConfig(replay_every=0), pair.learner, pair.sampler)


def test_interruptions_are_no_verdicts():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        closed("probe", "C4", interrupted)
    assert closed("probe", "C4", lambda: passed("probe", "C4")).passed


def test_unknown_checks_are_refused_by_name():
    with pytest.raises(ConfigError, match="dijest"):
        GuardConfig(off=("dijest",))


def test_every_linear_has_its_turn_within_the_stated_number_of_syncs():
    pair = Pair()
    keys = list(linears(pair.learner.plan))
    assert len(keys) == 14
    for per_sync in (1, 4, 14, 99):
        num = turns(len(keys), per_sync)
        assert {key for version in range(5, 5 + num) for key in due(keys, version=version, per_sync=per_sync)} == set(
            keys
        )


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj.weight", DOWN])
def test_the_self_check_sees_an_operand_that_digest_and_audit_cannot(name):
    pair = Pair(linears_per_sync=99, off=("digest", "probe"))
    pair.sync()
    pair.update()
    pair.bench.at = 1
    key = name.replace(".experts.3.", ".experts.")

    def act() -> None:
        values = pair.sampler.weights.operands[key].values
        (values[3] if values.dim() == 3 else values)[0].zero_()

    after_derive(pair.bench, act)
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    (verdict,) = caught.value.verdicts
    assert (verdict.check, verdict.condition, verdict.tensors) == ("selfcheck", "C3", (name,))


def test_audit_reads_modules_and_not_names():
    pair = Pair()
    pair.sync()
    assert audit(pair.learner.plan, pair.sampler).passed
    live = pair.sampler.describe()
    name = "lm_head.weight"
    for wrong in (live | {name: dataclasses.replace(live[name], format="mxfp8")}, live | {"extra": live[name]},
                  {n: x for n, x in live.items() if n != name}):  # fmt: skip
        wrap(pair.sampler, "describe", lambda original, wrong=wrong: wrong)
        verdict = audit(pair.learner.plan, pair.sampler)
        assert verdict.status == "failed" and verdict.tensors in ((name,), ("extra",))


def test_case_W9_freshness_of_tokens_versions_and_caches():
    pair = Pair()
    pair.sync()
    batch = batch_of(rollouts(pair))
    assert fresh_tokens(batch, version=0).passed
    assert fresh_tokens(batch, version=1).condition == "C7"
    assert fresh_tokens(Batch(sequences=()), version=0).status == "could not tell"
    assert fresh_sampler(pair.sampler, version=0, before=None).passed
    assert not fresh_sampler(pair.sampler, version=0, before=0).passed
    assert not fresh_sampler(pair.sampler, version=1, before=0).passed
    pair.learner.version += 1
    with pytest.raises(FailedChecks, match="the learner has version 1"):
        check_step(pair.guard, {}, batch, learner=pair.learner, logp=[])


def test_verdicts_are_metrics_and_incidents(tmp_path):
    from onegrid.rl.one_policy import incidents
    from onegrid.rl.record import Record

    pair = Pair()
    pair.sync()
    pair.update()
    flip(pair)
    with pytest.raises(FailedChecks), incidents(Record(tmp_path), pair.learner, 1):
        pair.sync()
    lines = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    digest = next(line for line in lines if line["check"] == "digest")
    assert digest["tensors"] == [DOWN] and digest["condition"] == "C2" and "row 0, block 0" in digest["found"]
    assert all(line[key] for line in lines for key in ("expected", "found", "likely_cause", "action"))


def test_case_Q11_Q12_one_amax_for_gate_and_up_and_none_per_shard():
    pair = Pair("moe", "nvfp4_experts")
    pair.sync()
    gate, up = (f"model.layers.0.mlp.experts.2.{kind}_proj.weight" for kind in ("gate", "up"))
    parts = pair.sampler.weights.parts
    assert_same_bytes(parts(gate)["amax"], parts(up)["amax"])
    largest = max(float(pair.learner.tensors()[n].to(torch.bfloat16).abs().max()) for n in (gate, up))
    assert float(parts(gate)["amax"]) == largest


def test_an_update_after_which_nothing_was_quantized_is_seen_whoever_made_it():
    for write in (True, False):
        pair = Pair()
        pair.sync()
        wrap(pair.learner, "_quantize", lambda original: None)
        if write:
            pair.update()  # counts, quantizes nothing
        else:
            with torch.no_grad():
                pair.learner.masters["lm_head.weight"].mul_(1.5)  # a write that nothing counts but torch
            pair.learner.version += 1
        with pytest.raises(FailedChecks) as caught:
            pair.sync()
        (verdict,) = caught.value.verdicts
        assert (verdict.check, verdict.condition) == ("bytes", "C2") and "lm_head.weight" in verdict.tensors


def test_an_operand_that_both_sides_forgot_is_seen_whosever_turn_it_is():
    for seed in range(2):  # o_proj has its turn in one version of fourteen
        pair = Pair(off=("selfcheck", "probe"))
        pair.learner.version += seed
        pair.sync()
        pair.bench.at = pair.learner.version + 1
        both_sides_forget(pair.bench)
        pair.update()
        with pytest.raises(FailedChecks) as caught:
            pair.sync()
        verdict = caught.value.verdicts[0]
        assert (verdict.check, verdict.tensors) == ("bytes", ("model.layers.1.self_attn.o_proj.weight",))


def test_a_transpose_that_was_not_made_again_is_seen():
    def native(seed: int) -> Operand:
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        return native_operand_of(quantize(x, QUANTIZERS["fp8_tensor"]))

    def site(rowwise: Operand, kept: Operand | None) -> Site:
        return Site("k", rowwise, QUANTIZERS["fp8_tensor"], None, "quantized", transposed=kept)

    new, old = native(1), native(0)
    sites = {"right": site(new, transposed(new)), "stale": site(new, transposed(old)), "none": site(new, None)}
    assert stale_transposes(sites, [*sites, "other"]) == ["stale"]


def test_a_fallback_forgets_a_calibration_that_was_of_another_plan(tmp_path):
    pair = Pair("tied", "fp8_tensor")
    keys = dict.fromkeys(WATCHED, 1.0)
    pair.guard.sentinel.expectation = Expectation(
        mean=keys, deviation=keys, model="m", plan_digest=pair.learner.plan.digest, engine="e", num_steps=20
    )
    keep_in_bf16(pair.learner, pair.sampler, pair.guard, ["model.layers.1.self_attn.o_proj.weight"])
    assert pair.guard.sentinel.expectation is None and not pair.guard.sentinel.exact


def test_an_engine_with_graphs_is_probed_through_one_every_time_and_without_in_turns(monkeypatch):
    pair = Pair(probe_every=4)
    eager, asked, astray = pair.sampler.probe, [], []

    def probe(prompts, captured=False):
        asked.append(captured)
        return [x + 1.0 if captured and astray else x for x in eager(prompts)]

    can = dataclasses.replace(pair.sampler.capabilities, captured=True)
    monkeypatch.setattr(type(pair.sampler), "capabilities", property(lambda self: can))
    monkeypatch.setattr(pair.sampler, "probe", probe)
    seen = []
    for version in range(6):
        asked.clear()
        pair.sync()
        seen.append((True in asked, False in asked))
        pair.update(version)
    assert seen == [(True, at in (0, 4)) for at in range(6)]
    astray.append(True)
    with pytest.raises(FailedChecks, match="captured: log-probabilities apart"):
        pair.sync()
    assert pair.sampler.version == 5
