"""Storage check and probe, line by line: what each compares is wrong once, and only that check is asked."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onegrid.guard.freshness import fresh_sampler, fresh_tokens
from onegrid.guard.injection import wrap
from onegrid.guard.probe import probe, probe_prompts
from onegrid.guard.selfcheck import selfcheck
from onegrid.guard.storage import compare_storage
from onegrid.rl.loop import snapshot
from tests.guard.pair import Pair
from tests.guard.test_guard import batch_of, rollouts


def _moved(s):
    key = next(key for key in s.read if key.endswith("o_proj.weight"))
    return dataclasses.replace(s, read=s.read | {key: tuple(x + 64 for x in s.read[key])})


def _table(s, which):
    tables = [x.clone() for x in s.tables]
    tables[which][3, 0] += 0.5
    return dataclasses.replace(s, tables=tuple(tables))


WRONG = {
    "another address": (_moved, "C4"),
    "one address not read": (lambda s: dataclasses.replace(s, read=dict(list(s.read.items())[1:])), "C4"),
    "another cos": (lambda s: _table(s, 0), "C3"),
    "another sin": (lambda s: _table(s, 1), "C3"),
    "another cache": (lambda s: dataclasses.replace(s, kv_cache="fp8"), "C1"),
    "another head": (lambda s: dataclasses.replace(s, logits=lambda x: s.logits(x) * 1.001), "C3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_thing_that_a_storage_check_compares_is_compared(name):
    pair = Pair()
    pair.sync()
    change, condition = WRONG[name]
    wrap(pair.sampler, "reads", lambda original: change(original()))
    verdict = compare_storage(pair.learner, pair.sampler)
    assert (verdict.status, verdict.condition) == ("failed", condition)
    if name == "another address":
        assert verdict.tensors == ("model.layers.0.self_attn.o_proj.weight",)


def asked(pair, *, bits=True, previous=None, changed=True, band=None, change=lambda x: x):
    """The verdict of a probe whose answers are changed on the way."""

    class Changed:
        capabilities = dataclasses.replace(pair.sampler.capabilities, bits=bits)

        def probe(self, prompts, captured=False):
            return [change(x) for x in pair.sampler.probe(prompts, captured=captured)]

    prompts = probe_prompts(pair.learner.spec.vocab_size)
    return probe(
        pair.learner, Changed(), snapshot(pair.learner), prompts, previous=previous, changed=changed, band=band
    )[0]


def test_a_probe_of_an_exact_engine_is_held_to_every_bit_of_a_whole_answer():
    pair = Pair()
    pair.sync()
    assert asked(pair).passed
    assert asked(pair, change=lambda x: torch.nextafter(x, torch.zeros_like(x))).status == "failed"
    assert asked(pair, change=lambda x: x[:-1]).status == "could not tell"
    assert asked(pair, change=lambda x: x * float("nan")).condition == "C6"


def test_a_probe_of_another_engine_is_held_to_its_band_and_to_an_answer_of_its_own_version():
    pair = Pair()
    pair.sync()
    now = pair.sampler.probe(probe_prompts(pair.learner.spec.vocab_size))
    near = {"bits": False, "change": lambda x: x + 0.1}
    assert asked(pair, **near, band=0.2).passed
    assert asked(pair, **near, band=0.05).status == "failed"
    assert asked(pair, **near, band=None).status == "could not tell"
    assert asked(pair, bits=False, band=0.2, previous=now).status == "failed"  # weights moved, the answer did not
    assert asked(pair, bits=False, band=0.2, previous=now, changed=False).passed


def test_a_band_is_held_against_several_tokens_so_that_none_hides_a_fault_or_raises_an_alarm_alone():
    pair = Pair()
    pair.sync()
    vocab, seen = pair.learner.spec.vocab_size, []
    for token in range(vocab):
        one = torch.zeros(vocab)
        one[token] = 1.0
        seen.append(asked(pair, bits=False, band=0.1, change=lambda x, one=one: x + one).status == "failed")
    assert sum(seen) == 8
    one = torch.zeros(vocab)
    one[seen.index(True)] = 1.0
    assert asked(pair, bits=False, band=0.2, change=lambda x: x + one).passed
    assert asked(pair, bits=False, band=0.2, change=lambda x: x + 1 - one).status == "failed"


def test_a_probe_asks_about_another_token_each_version():
    pair = Pair()
    pair.sync()
    unseen = []
    for version in (0, 1):
        pair.learner.version = version
        for token in range(pair.learner.spec.vocab_size):
            other = torch.zeros(pair.learner.spec.vocab_size)
            other[token] = 1e-3
            if asked(pair, change=lambda x, other=other: x + other).passed:
                unseen.append((version, token))
    seen = {v: set(range(pair.learner.spec.vocab_size)) - {t for u, t in unseen if u == v} for v in (0, 1)}
    assert len(seen[0]) == len(seen[1]) == 1 and seen[0] != seen[1]


def test_prompts_that_outlive_an_update_and_tokens_without_a_label_are_stale():
    pair = Pair()
    pair.sync()
    batch = batch_of(rollouts(pair))
    short = [dataclasses.replace(s, version_R=s.version_R[:-1]) for s in batch.sequences]
    assert fresh_tokens(dataclasses.replace(batch, sequences=tuple(short)), version=0).status == "failed"
    wrap(pair.sampler, "cached_versions", lambda original: {0, 1})
    assert fresh_sampler(pair.sampler, version=0, before=None).status == "failed"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_products_that_are_not_finite_are_outside_every_bound(bad):
    pair = Pair()
    pair.sync()
    held = snapshot(pair.learner)
    assert selfcheck(pair.learner.plan, pair.sampler, held, per_sync=99).passed
    wrap(pair.sampler, "multiply", lambda original, key, x: original(key, x).fill_(bad))
    assert selfcheck(pair.learner.plan, pair.sampler, held, per_sync=99).status == "failed"
