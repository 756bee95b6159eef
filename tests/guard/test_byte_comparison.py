"""The learner against itself, where nobody else would object: every link from masters to linears, on its own."""

from __future__ import annotations

import pytest
import torch

from onegrid.guard import byte_comparison
from onegrid.guard.byte_comparison import compare_bytes
from onegrid.guard.causes import NOT_MERGED
from onegrid.guard.faults import FAULTS
from onegrid.guard.injection import wrap
from onegrid.guard.turns import due
from onegrid.guard.verdict import FailedChecks
from tests.guard.pair import Pair


def test_sent_again_what_both_sides_forgot_is_refused_again():
    pair = Pair(on_failure="resend")
    pair.sync()
    pair.update()
    pair.sync()
    pair.bench.at = 2
    FAULTS["both_sides_forget"].inject(pair.bench)
    pair.update()
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert [(v.check, set(v.tensors)) for v in caught.value.verdicts] == [("bytes", pair.bench.touched)]


def test_an_operand_that_only_the_learner_has_otherwise_is_named_by_bytes_alone():
    pair = Pair(off=("probe",))
    pair.sync()
    pair.bench.at = 1
    FAULTS["learner_reads_other_codes"].inject(pair.bench)
    pair.update()
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert [(v.check, set(v.tensors)) for v in caught.value.verdicts] == [("bytes", pair.bench.touched)]


def test_an_operand_that_is_wrong_alike_on_both_sides_is_derived_again_when_it_has_its_turn():
    pair = Pair(off=("digest", "probe", "selfcheck"), linears_per_sync=99)
    pair.sync()
    key = next(key for key in pair.learner.keys if key.endswith("o_proj.weight"))

    def derive(original, *arguments):
        original(*arguments)
        for live in (pair.learner.live, pair.sampler.weights):
            live.operands[key].values[0].zero_()

    wrap(pair.sampler.weights, "derive", derive)
    pair.update()
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert [(v.check, v.tensors) for v in caught.value.verdicts] == [("bytes", tuple(pair.learner.keys[key]))]


def test_a_master_that_changed_behind_torch_s_back_is_quantized_again_when_it_has_its_turn():
    pair = Pair(linears_per_sync=99)
    pair.sync()
    pair.update()
    key = next(key for key in pair.learner.keys if key.endswith("o_proj.weight"))
    pair.learner.masters[key].detach().numpy()[0, 0] += 1.0  # torch counts no write
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert [(v.check, v.tensors) for v in caught.value.verdicts] == [("bytes", tuple(pair.learner.keys[key]))]


def test_a_code_that_changed_after_it_was_made_is_named_though_both_sides_agree_on_it():
    pair = Pair()
    pair.sync()
    pair.update()
    due_now = due(list(pair.learner.masters), version=pair.learner.version, per_sync=1)
    name = next(n for key, names in pair.learner.keys.items() for n in names if key not in due_now and "_proj" in n)
    pair.learner.live.parts(name)["codes"][0, 0] ^= 1
    pair.learner.live.derive()
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert [(v.check, v.tensors) for v in caught.value.verdicts] == [("bytes", (name,))]


def test_an_update_that_torch_counts_no_write_of_must_be_quantized_too():
    pair = Pair()
    pair.sync()
    due_now = due(list(pair.learner.masters), version=pair.learner.version + 1, per_sync=1)
    key = next(key for key in pair.learner.keys if key.endswith("o_proj.weight") and key not in due_now)
    pair.learner.masters[key].detach().numpy()[0, 0] += 1.0
    pair.learner.num_updates += 1
    pair.learner.version += 1
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert [(v.check, v.tensors) for v in caught.value.verdicts] == [("bytes", tuple(pair.learner.keys[key]))]


def test_a_linear_of_the_learner_that_reads_a_copy_of_its_own_is_named_by_bytes_alone():
    pair = Pair(off=("probe",))
    pair.sync()
    pair.bench.at = 1
    FAULTS["learner_keeps_a_copy"].inject(pair.bench)
    pair.update()
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert [(v.check, set(v.tensors)) for v in caught.value.verdicts] == [("bytes", pair.bench.touched)]


def test_a_stale_transpose_stops_a_version(monkeypatch):
    pair = Pair()
    key = next(iter(pair.learner.grad_weights.sites))
    asked: list[str] = []
    monkeypatch.setattr(byte_comparison, "stale_transposes", lambda sites, keys: asked.extend(keys) or [key])
    verdict = compare_bytes(pair.learner)
    assert (verdict.status, verdict.tensors) == (
        "failed",
        tuple(pair.learner.keys[key]),
    ) and "transpose" in verdict.cause
    assert set(asked) >= set(due(list(pair.learner.masters), version=0, per_sync=1))


@pytest.mark.parametrize("field", ["backward", "calls"])
def test_a_backward_mode_is_the_one_that_was_asked_for_and_the_one_that_ran(field):
    pair = Pair()
    key, site = next(item for item in pair.learner.grad_weights.sites.items() if item[0].endswith("o_proj.weight"))
    assert compare_bytes(pair.learner).passed
    other = "high_precision" if site.backward != "high_precision" else "dequantized"
    if field == "backward":
        site.backward = other
    else:
        site.calls[other] = 1
    verdict = compare_bytes(pair.learner)
    assert (verdict.status, verdict.tensors) == ("failed", tuple(pair.learner.keys[key]))


@pytest.mark.parametrize(("row", "per_sync"), [(0, 1), (7, 99)])
def test_masters_are_base_and_adapters_in_a_row_of_each_at_once_and_whole_when_they_have_their_turn(row, per_sync):
    pair = Pair("adapted")
    assert compare_bytes(pair.learner, per_sync=per_sync).passed
    key = "model.layers.1.self_attn.o_proj.weight"
    with torch.no_grad():
        pair.learner.masters[key][row] += 1.0
    verdict = compare_bytes(pair.learner, per_sync=per_sync)
    assert (verdict.status, verdict.tensors, verdict.cause) == ("failed", (key,), NOT_MERGED)


def test_tensors_that_share_an_amax_are_quantized_again_together():
    pair = Pair("moe", "nvfp4_experts")
    for version in range(len(pair.learner.masters)):
        pair.learner.version = version
        assert compare_bytes(pair.learner, per_sync=1).passed
