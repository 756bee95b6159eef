"""Inputs for which a check passed although it should not have: each is an answer, a file or an order of events."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from onegrid.errors import ConfigError
from onegrid.guard.audit import audit
from onegrid.guard.config import GuardConfig
from onegrid.guard.digests import compare_digests
from onegrid.guard.faults import FAULTS
from onegrid.guard.freshness import fresh_sampler, fresh_tokens
from onegrid.guard.injection import wrap
from onegrid.guard.sentinel import (
    ALLOWANCE,
    RUN_LENGTH,
    WATCHED,
    Expectation,
    Sentinel,
    calibrate,
    limit_for,
    load_expectation,
    save_expectation,
)
from onegrid.guard.storage import compare_storage
from onegrid.guard.verdict import FailedChecks
from onegrid.rl.loop import snapshot
from onegrid.sampler.base import engine_of
from onegrid.sync import manifest_of
from tests.guard.pair import Pair
from tests.guard.test_guard import batch_of, rollouts
from tests.guard.test_sentinel import EQUAL, calibration


@pytest.mark.parametrize("answer", ["", None])
@pytest.mark.parametrize("field", ["format", "activation"])
def test_an_audit_takes_no_empty_format_for_the_planned_one(field, answer):
    pair = Pair()
    pair.sync()
    name = "lm_head.weight"
    live = pair.sampler.describe()
    wrap(pair.sampler, "describe", lambda original: live | {name: dataclasses.replace(live[name], **{field: answer})})
    verdict = audit(pair.learner.plan, pair.sampler)
    if (field, answer) == ("activation", None):  # "cannot tell", which the protocol allows
        assert verdict.passed
    else:
        assert (verdict.status, verdict.tensors) == ("failed", (name,))


ADDRESSES = {
    "none": lambda s: dataclasses.replace(s, read={}, proved={}),
    "all but one": lambda s: dataclasses.replace(s, read=_less(s.read), proved=_less(s.proved)),
    "one without any": lambda s: dataclasses.replace(s, read=_bare(s.read), proved=_bare(s.proved)),
    "one more": lambda s: dataclasses.replace(s, read=s.read | {"x": (1,)}, proved=s.proved | {"x": (1,)}),
    "a sin of one position": lambda s: dataclasses.replace(s, tables=(s.tables[0], s.tables[1][:1])),
    "no positions": lambda s: dataclasses.replace(s, tables=(s.tables[0][:0], s.tables[1][:0])),
    "a third table": lambda s: dataclasses.replace(s, tables=(*s.tables, s.tables[0])),
}


def _less(addresses):
    return dict(list(addresses.items())[1:])


def _bare(addresses):
    return addresses | {next(iter(addresses)): ()}


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_storage_check_wants_the_addresses_of_every_weight_and_whole_tables(name):
    pair = Pair()
    pair.sync()
    assert compare_storage(pair.learner, pair.sampler).passed
    wrap(pair.sampler, "reads", lambda original: ADDRESSES[name](original()))
    assert compare_storage(pair.learner, pair.sampler).status == "could not tell"


@pytest.mark.parametrize("answer", ["", {}, [True], [0.0], ["0"], [None]])
def test_versions_of_caches_are_integers(answer):
    pair = Pair()
    pair.sync()
    wrap(pair.sampler, "cached_versions", lambda original: answer)
    assert fresh_sampler(pair.sampler, version=0, before=None).status == "could not tell"


def test_versions_of_tokens_are_integers_and_there_is_one_at_least():
    pair = Pair()
    pair.sync()
    batch = batch_of(rollouts(pair))

    def with_labels(change):
        made = [dataclasses.replace(s, version_R=change(s.version_R)) for s in batch.sequences]
        return fresh_tokens(dataclasses.replace(batch, sequences=tuple(made)), version=0)

    assert with_labels(lambda v: v).passed
    assert with_labels(lambda v: v + 0.7).status == "could not tell"
    assert with_labels(lambda v: v > 0).status == "could not tell"
    assert with_labels(lambda v: v[:0]).status == "could not tell"


@pytest.mark.parametrize(
    "wrong",
    [{"on_failure": "banana"}, {"unknown": "banana"}]
    + [{name: math.nan} for name in ("probe_every", "replay_every", "linears_per_sync", "bucket_bytes", "probe_band",
                                     "replay_band", "replay_sequences")],
    ids=str,
)  # fmt: skip
def test_a_configuration_of_python_is_held_to_what_a_file_is(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GuardConfig(**wrong)


BROKEN = {
    "a mean is NaN": {"mean": dict.fromkeys(WATCHED, math.nan)},
    "a mean is Inf": {"mean": dict.fromkeys(WATCHED, math.inf)},
    "a mean is text": {"mean": dict.fromkeys(WATCHED, "0")},
    "means are a list": {"mean": [0.0]},
    "a deviation is 0": {"deviation": dict.fromkeys(WATCHED, 0.0)},
    "one metric only": {"mean": {WATCHED[0]: 0.0}, "deviation": {WATCHED[0]: 1.0}},
    "a metric that nobody watches": {"mean": dict.fromkeys([*WATCHED, "x"], 0.0)},
    "no steps": {"num_steps": 0},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_calibration_that_could_not_object_is_refused(name, tmp_path):
    path = tmp_path / "calibration.json"
    save_expectation(calibration(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | BROKEN[name]))
    with pytest.raises(ConfigError, match="calibration"):
        load_expectation(path, plan_digest="p", engine="e")


def test_a_calibration_belongs_to_one_engine_and_one_model(tmp_path):
    path = tmp_path / "calibration.json"
    save_expectation(calibration(), path)
    assert load_expectation(path, plan_digest="p", engine="e") == calibration()
    for other in ({"engine": "f", "model": "m"}, {"engine": "e", "model": "n"}):
        with pytest.raises(ConfigError, match="measure again"):
            load_expectation(path, plan_digest="p", **other)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not a calibration"):
        load_expectation(path, plan_digest="p", engine="e")


def test_a_mismatch_that_never_moved_is_no_calibration():
    with pytest.raises(ConfigError, match="had the same mismatch"):
        calibrate([EQUAL] * 20, model="m", plan_digest="p", engine="e")
    lines = [EQUAL | {"mismatch/max_abs": 1e-3 + i % 2 * 1e-5} for i in range(20)]
    found = calibrate(lines, model="m", plan_digest="p", engine="e")
    assert found.mean["mismatch/p99"] == 0 and found.deviation["mismatch/p99"] == found.deviation["mismatch/max_abs"]
    sentinel = Sentinel(exact=False, expectation=found)
    assert not sentinel.judge(lines[0] | {"mismatch/kl": 0.047}).passed


def test_a_metric_that_was_not_measured_is_not_finite():
    for key in WATCHED:
        for exact in (True, False):
            verdict = Sentinel(exact=exact).judge({k: x for k, x in EQUAL.items() if k != key})
            assert verdict.status == "failed" and key in verdict.found


def test_a_sampler_that_already_has_the_version_is_proved_before_it_is_calibrated():
    from onegrid.rl.characters import CharacterTokenizer
    from onegrid.study.calibration import batches, measure
    from onegrid.study.pairing import Sums
    from onegrid.types import Sampling

    pair = Pair("tied", "fp8_tensor", unknown="record")
    pair.sync()
    pair.sampler.weights.parts("model.norm.weight")["values"].view(torch.int16)[0] ^= 1
    task = Sums(CharacterTokenizer(), num_prompts=2, seed=0, digits=1)
    drawn = batches(task, pair.sampler, samples=2, seed=0, sampling=Sampling(max_new_tokens=4))
    with pytest.raises(FailedChecks, match="not in order"):
        measure(pair.learner, pair.sampler, drawn, 20, model="tied")


def test_a_second_refusal_of_another_kind_does_not_hide_the_first():
    pair = Pair(on_failure="resend")
    pair.sync()
    pair.update()
    pair.bench.at = 1
    FAULTS["operand_not_rebuilt"].inject(pair.bench)
    wrap(pair.sampler, "abort", lambda original: None)
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert [(v.check, v.condition) for v in caught.value.verdicts] == [("transaction", "C7"), ("digest", "C3")]
    assert "the first time it was digest" in caught.value.__notes__[-1]


def test_an_audit_compares_shapes_too():
    pair = Pair()
    pair.sync()
    name = "lm_head.weight"
    live = pair.sampler.describe()
    wrong = live | {name: dataclasses.replace(live[name], shape=live[name].shape[::-1])}
    wrap(pair.sampler, "describe", lambda original: wrong)
    verdict = audit(pair.learner.plan, pair.sampler)
    assert (verdict.status, verdict.tensors) == ("failed", (name,))


def test_digests_of_nothing_prove_nothing():
    pair = Pair()
    held = snapshot(pair.learner)
    pair.sync()
    manifest = manifest_of(held)
    assert compare_digests(manifest, pair.sampler, held).passed
    assert compare_digests(dataclasses.replace(manifest, entries={}), pair.sampler, held).status == "could not tell"


@pytest.mark.parametrize("wrong", [{"mismatch/share_equal": 0.999}, {"mismatch/max_abs": 1e-7}], ids=str)
def test_an_exact_pairing_is_equal_bits_and_no_difference(wrong):
    assert Sentinel(exact=True).judge(EQUAL | wrong).status == "failed"


def test_the_limit_of_a_chart_is_that_of_all_watched_metrics_together():
    even = dict.fromkeys(WATCHED, 1.0)
    expectation = Expectation(mean=dict.fromkeys(WATCHED, 0.0), deviation=even, model="m", plan_digest="p",
                              engine="e", num_steps=20)  # fmt: skip
    sentinel = Sentinel(exact=False, expectation=expectation)
    line = {key: ALLOWANCE + 1.0 for key in WATCHED}  # each step adds 1
    quiet = math.floor(limit_for(RUN_LENGTH * len(WATCHED)))
    assert [sentinel.judge(line).passed for _ in range(quiet + 1)] == [True] * quiet + [False]


def test_engines_are_told_apart_by_what_they_say_or_what_they_are():
    class Told:
        engine_version = "0.32.0"

    class Silent:
        """Says nothing."""

    assert engine_of(Told()) == "0.32.0"
    assert engine_of(Silent()) != engine_of(Pair().sampler)
