"""Conditions C2 to C7, evaluated on a live vLLM by the whole guard, as a run does it: one fault in each.

C1 takes an engine that was started otherwise than the plan says: `test_faults.py`, F1 and F2.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from onegrid.guard.config import CHECKS, GuardConfig
from onegrid.guard.guard import Guard, GuardReport, check_step, guard_of, guard_sync
from onegrid.guard.sentinel import WATCHED
from onegrid.guard.verdict import FailedChecks
from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.model.spec import tensor_shapes
from onegrid.sampler.vllm import load as loading
from onegrid.types import Batch, Bucket, Piece, Sequence
from tests.sampler.tiny import requests_of
from tests.vllm.engines import Running

pytestmark = pytest.mark.filterwarnings("ignore")
UP = "model.layers.1.mlp.up_proj.weight"


@dataclass
class Pair:
    """A learner, a live engine, and the guard between them."""

    running: Running
    learner: Learner
    guard: Guard

    def sync(self) -> GuardReport:
        """A step of the optimizer on random gradients, and its weights into the engine."""
        version = next(self.running.versions)
        generator = torch.Generator().manual_seed(version)
        for parameter in self.learner.trained.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.learner.version = version - 1
        self.learner.step()
        return guard_sync(self.learner, self.running.sampler, self.guard)

    def said(self) -> list[Any]:
        """What the engine says to fixed prompts."""
        return [(r.tokens_R.tolist(), r.logp_R.tolist()) for r in self.running.sampler.generate(requests_of(4))]


@pytest.fixture
def pair(dense: Running) -> Iterator[Pair]:
    """Synchronized once, every check passed; afterwards the engine is whole again."""
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(dense.spec)
    tensors = {n: torch.randn(s, generator=generator) * 0.1 + (len(s) == 1) for n, s in shapes.items()}
    learner = Learner(dense.spec, dense.plan, tensors, LearnerConfig(lr=1e-2))
    config = GuardConfig(probe_band=0.2, unknown="record", linears_per_sync=99, replay_every=1)
    made = Pair(dense, learner, guard_of(config, learner, dense.sampler))
    first = made.sync()
    assert {v.check for v in first.verdicts if v.passed} >= {"bytes", "audit", "digest", "selfcheck", "probe"}
    yield made


def refused(pair: Pair) -> tuple[FailedChecks, dict[str, Any]]:
    """A synchronization that is refused, after which the version before says what it said."""
    before, said = pair.running.sampler.version, pair.said()
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert pair.running.sampler.version == before
    return caught.value, {"said": said}


def test_a_healthy_engine_passes_every_check_that_it_can_answer(pair):
    verdicts = {v.check: v.status for v in pair.sync().verdicts}
    assert verdicts == dict.fromkeys(set(CHECKS) - {"sentinel"}, "passed")


def test_condition_C2_a_byte_that_was_changed_on_its_way(pair, monkeypatch):
    receive = pair.running.sampler.receive

    def flipped(bucket):
        pieces = []
        for piece in bucket.pieces:
            data = piece.data.clone()
            if piece.name == UP and piece.part == "codes" and piece.offset == 0:
                data[7] ^= 1
            pieces.append(dataclasses.replace(piece, data=data))
        receive(Bucket(version=bucket.version, pieces=tuple(pieces)))

    monkeypatch.setattr(pair.running.sampler, "receive", flipped)
    error, before = refused(pair)
    assert [(v.condition, v.tensors) for v in error.verdicts] == [("C2", (UP,))]
    assert pair.said() == before["said"]


def test_condition_C3_weights_that_the_engine_derives_nothing_from(pair, monkeypatch):
    load, calls = loading.load, []

    def lazy(inside, config):
        calls.append(1)
        if len(calls) > 1:  # the way back works
            load(inside, config)

    monkeypatch.setattr(loading, "load", lazy)
    error, before = refused(pair)
    (verdict,) = [v for v in error.verdicts if v.check == "digest"]
    assert verdict.condition == "C3" and UP in verdict.tensors
    assert pair.said() == before["said"]


def test_condition_C4_an_update_that_lands_beside_the_storage_that_is_read(pair):
    module = pair.running.inside.model.model.layers[1].mlp.down_proj
    norm = pair.running.inside.model.model.norm
    kept = norm.weight
    norm.weight = torch.nn.Parameter(kept.data.clone(), requires_grad=False)
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert {v.condition for v in caught.value.verdicts if not v.passed} >= {"C4"}
    assert any("model.norm.weight" in v.tensors for v in caught.value.verdicts)
    norm.weight = kept
    assert module is not None
    pair.sync()


def test_condition_C5_a_piece_that_never_arrives(pair, monkeypatch):
    receive = pair.running.sampler.receive

    def lossy(bucket):
        kept: tuple[Piece, ...] = tuple(p for p in bucket.pieces if (p.name, p.part) != (UP, "scales"))
        receive(Bucket(version=bucket.version, pieces=kept))

    monkeypatch.setattr(pair.running.sampler, "receive", lossy)
    error, before = refused(pair)
    assert [(v.check, v.condition, v.tensors) for v in error.verdicts] == [("transaction", "C5", (UP,))]
    assert pair.said() == before["said"]


@pytest.mark.parametrize(("factor", "condition"), [(float("nan"), "C6"), (-4.0, "C4")])
def test_condition_C6_every_byte_right_and_the_whole_computes_otherwise(pair, factor, condition):
    """Residuals that are scaled or spoiled: no weight knows of it, the probe does."""
    module = pair.running.inside.model.model.layers[1].mlp
    hook = module.register_forward_hook(lambda module, x, out: out * factor)
    try:
        with pytest.raises(FailedChecks) as caught:
            pair.sync()
    finally:
        hook.remove()
    named = {(v.check, v.condition) for v in caught.value.verdicts if not v.passed}
    assert named == {("probe", condition), ("storage", condition)}, (
        "without addresses, storage is seen by the probe alone"
    )
    pair.sync()


def test_condition_C6_log_probs_that_no_rounding_explains_are_seen_at_the_step(pair):
    rollouts = pair.running.sampler.generate(requests_of(24, samples=1, max_new_tokens=20, stop_token_ids=()))

    def batch(shift):
        sequences = tuple(
            Sequence(
                tokens_T=torch.cat([torch.tensor(r.request.prompt_tokens), r.tokens_R]),
                num_prompt=len(r.request.prompt_tokens),
                sampler_logp_R=r.logp_R + shift,
                version_R=r.version_R,
                advantage_R=torch.zeros(len(r.tokens_R)),
                mask_R=torch.ones(len(r.tokens_R), dtype=torch.bool),
                group_id=r.request.prompt_index,
            )
            for r in rollouts
        )
        return Batch(sequences=sequences)

    def judged(shift):
        made = batch(shift)
        logp = pair.learner.log_probs(made)
        return check_step(
            pair.guard, dict.fromkeys(WATCHED, 0.0) | {"mismatch/max_abs": shift}, made, learner=pair.learner, logp=logp
        )

    assert {v.check: v.status for v in judged(0.0)} == {"freshness": "passed", "sentinel": "passed"}
    with pytest.raises(FailedChecks) as caught:
        for _ in range(4):
            pair.sync()
            rollouts[:] = pair.running.sampler.generate(
                requests_of(24, samples=1, max_new_tokens=20, stop_token_ids=())
            )
            judged(0.8)
    assert [(v.check, v.condition) for v in caught.value.verdicts if not v.passed] == [("sentinel", "C6")]


def test_condition_C7_a_cache_of_the_version_before(pair, monkeypatch):
    pair.sync()
    monkeypatch.setattr(pair.running.sampler.engine, "reset_prefix_cache", lambda: None)
    with pytest.raises(FailedChecks) as caught:
        pair.sync()
    assert [(v.check, v.condition) for v in caught.value.verdicts if not v.passed] == [("freshness", "C7")]
    monkeypatch.undo()
    pair.sync()


def test_a_second_update_while_it_generates_waits_its_turn(dense):
    """From another thread, as a loop of one's own might do it: tokens are of the one version that they name."""
    wanted = requests_of(40, max_new_tokens=60, stop_token_ids=())
    first, second = dense.sampler.version, dense.snapshot()
    expected = {first: [r.tokens_R.tolist() for r in dense.sampler.generate(wanted)]}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(dense.sampler.generate, wanted)
        while not answer.running():
            time.sleep(0.001)
        dense.push(second)
    rollouts = answer.result()
    expected[second.version] = [r.tokens_R.tolist() for r in dense.sampler.generate(wanted)]
    assert expected[first] != expected[second.version]
    (version,) = {int(v) for r in rollouts for v in r.version_R}
    assert [r.tokens_R.tolist() for r in rollouts] == expected[version]
    dense.sampler.digest(dense.plan.tensors)


def test_an_engine_that_dies_in_the_middle_of_an_update_says_so_and_keeps_nobody_waiting(tmp_path):
    """In a process of its own, which vLLM 0.32 would wait for without end; here it is killed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("src", "."))}
    printed = tmp_path / "printed"  # a file, since processes that are left over would hold a pipe open
    with open(printed, "wb") as file:
        subprocess.run([sys.executable, "-c", DIES], env=environment, stdout=file, stderr=file, check=False)
    text = printed.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("told: ")]
    assert lines == ["told: SyncError C5 the engine's process has ended"] * 4, text


ROOT = Path(__file__).parents[2]
DIES = """
import faulthandler
import multiprocessing
from onegrid.errors import SyncError
from onegrid.sync import buckets, manifest_of
from tests.patience import PATIENCE_S
from tests.sampler.tiny import requests_of
from tests.vllm.engines import start

def told(call):
    try:
        call()
    except SyncError as error:
        print("told:", type(error).__name__, error.condition, str(error).partition(",")[0], flush=True)

if __name__ == "__main__":
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    apart = start("dense", "bf16", apart=True, eager=True)
    apart.push()
    snapshot = apart.snapshot()
    apart.sampler.begin(manifest_of(snapshot))
    for bucket in buckets(snapshot):
        apart.sampler.receive(bucket)
    for process in multiprocessing.active_children():
        process.kill()
    told(lambda: apart.sampler.commit(snapshot.version))
    told(lambda: apart.sampler.generate(requests_of(1)))
    told(lambda: apart.sampler.begin(manifest_of(snapshot)))
    told(apart.sampler.describe)
    apart.sampler.close()
"""
