"""What a failure does, in the real loop: stop, send again once, or go on in BF16; and what the sentinel alone sees."""

from __future__ import annotations

import json

import pytest

from onegrid.guard.config import CHECKS, GuardConfig
from onegrid.guard.faults import FAULTS
from onegrid.guard.guard import guard_of
from onegrid.guard.injection import after_load
from onegrid.guard.verdict import FailedChecks
from onegrid.rl.record import read_metrics
from onegrid.study.pairing import AT, STEPS, make_bench, run_loop

DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def run(folder, *, times, **config):
    """A run in which the updates of version AT and later arrive with one changed byte, `times` times."""
    bench = make_bench()
    guard = guard_of(GuardConfig(**config), bench.learner, bench.sampler)
    left = [times]

    def act() -> None:
        if left[0] > 0 and bench.learner.plan[DOWN].weight:
            left[0] -= 1
            bench.weights.parts(DOWN)["codes"][0, 5] ^= 1

    after_load(bench, act)
    return bench, lambda: run_loop(bench, guard, folder)


def incidents(folder):
    """Lines of the record."""
    return [json.loads(line) for line in (folder / "incidents.jsonl").read_text().splitlines()]


def test_stop_ends_the_run_before_the_version_serves(tmp_path):
    bench, go = run(tmp_path, times=99)
    with pytest.raises(FailedChecks, match="row 0, block 0, column 5"):
        go()
    assert bench.sampler.version == AT - 1
    assert {line["step"] for line in read_metrics(tmp_path)} == set(range(AT))
    assert any(line["tensors"] == [DOWN] for line in incidents(tmp_path))


def test_resend_goes_on_and_leaves_an_incident(tmp_path):
    bench, go = run(tmp_path, times=1, on_failure="resend")
    go()
    assert bench.sampler.version == STEPS
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(STEPS + 1))
    found = [line for line in incidents(tmp_path) if line["check"] == "digest"]
    assert found[0]["tensors"] == [DOWN] and "sent again" in found[0]["action"]


def test_bf16_goes_on_exact_with_the_change_in_the_record(tmp_path):
    bench, go = run(tmp_path, times=99, on_failure="bf16")
    go()
    assert bench.sampler.version == STEPS and bench.sampler.describe()[DOWN].format == "bf16"
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert all(line["mismatch/max_abs"] == 0 for line in lines if "mismatch/max_abs" in line)
    assert any("BF16" in line["action"] and DOWN in line["action"] for line in incidents(tmp_path))


@pytest.mark.parametrize("name", ["gate_up_in_bf16", "experts_not_repacked"])
def test_faults_F2_and_F4_fire_in_the_sentinel_alone(name, tmp_path):
    fault = FAULTS[name]
    bench = make_bench(fault.model, fault.preset)
    guard = guard_of(GuardConfig(off=tuple(c for c in CHECKS if c != "sentinel")), bench.learner, bench.sampler)
    fault.inject(bench)
    with pytest.raises(FailedChecks) as caught:
        run_loop(bench, guard, tmp_path)
    (verdict,) = caught.value.verdicts
    assert fault.published in ("F2", "F4") and verdict.check == "sentinel"
    assert [line["step"] for line in read_metrics(tmp_path)][-1] == AT  # the first step that sampled with the fault


def test_a_layer_that_computes_otherwise_is_named_by_the_traces_of_the_sentinel_alone(tmp_path):
    fault = FAULTS["one_layer_served_otherwise"]
    for traces in (False, True):
        bench = make_bench(fault.model, fault.preset)
        guard = guard_of(GuardConfig(off=("probe",), traces=traces), bench.learner, bench.sampler)
        fault.inject(bench)
        with pytest.raises(FailedChecks) as caught:
            run_loop(bench, guard, tmp_path / str(traces))
        (verdict,) = caught.value.verdicts
        assert verdict.check == "sentinel"
        assert set(verdict.tensors) == (bench.touched if traces else set())
    assert verdict.where[0] == "first model.layers.1.self_attn.o_proj.weight"
