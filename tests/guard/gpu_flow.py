"""The flow of data that a pairing has on a GPU, on a CPU: weights that lie together, and steps that were captured.

Only addresses are at stake, and no kernel: a captured step reads the storage that it was captured with, whatever an
engine holds by then, and nothing that is Python's takes part in it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from onegrid.guard.injection import Bench, wrap
from onegrid.model import live as live_module
from onegrid.model import packed
from onegrid.model.live import LiveWeights
from onegrid.model.packed import PackedWeights
from onegrid.ops import matmul_choice
from onegrid.sampler import engine, graphs
from onegrid.sampler.prefill import Model
from onegrid.sampler.serving import read_addresses
from onegrid.study import campaign, pairing
from tests.sampler.test_captured_host import Arrived
from tests.sampler.test_codes_only import by_definition


class Captured(graphs.Graphs):
    """Steps that are run by their launches, on what they were captured with."""

    bench: Bench
    """The last that was made, whose fault is in the steps that are captured while it acts, and in no other."""

    def _capture(self, model: Any, rows: int, sampling: Any) -> Any:
        stops = self.stops.setdefault(sampling.stop_token_ids, torch.tensor(sampling.stop_token_ids, dtype=torch.int64))
        held = model if self.bench.armed else Model(fixed(model.weights), model.rope, model.version, 0)
        self.reads = read_addresses(held.weights)
        arguments = (rows, sampling.temperature, stops, sampling.record_routing)
        return Step(lambda: graphs.step(held, self.cache, self.state, *arguments))


class Step:
    """A graph of one step."""

    def __init__(self, replay: Any) -> None:
        self.replay = replay


def fixed(weights: LiveWeights) -> LiveWeights:
    """Weights that keep the storage that `weights` has now, without what a fault has wrapped."""
    out = copy.copy(weights)
    for name, value in list(vars(out).items()):
        if isinstance(value, dict):
            setattr(out, name, dict(value))
        elif hasattr(LiveWeights, name):
            delattr(out, name)
    return out


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """From here on every pairing of the fault campaign flows so."""
    empty, made = torch.empty, pairing.make_bench

    def derive(live: LiveWeights) -> None:
        def joined(original: Any, *arguments: Any) -> None:
            original(*arguments)
            if live.operands and not live.joined:
                live._join()

        wrap(live, "derive", joined)

    def make_bench(*arguments: Any, **named: Any) -> Bench:
        bench = made(*arguments, **named)
        patch.setattr(Captured, "bench", bench, raising=False)
        live = bench.weights
        derive(live)
        if not live.keeps_operands:
            live.packed = PackedWeights(live.held, live.groups, live.activation, live.device, decoded=False)
        return bench

    patch.setattr(torch.cuda, "graph_pool_handle", object)
    patch.setattr(torch.cuda, "Event", Arrived)
    patch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    patch.setattr(Model, "draw", lambda self, *of: self.weights.kernels.draw(*of)[0])
    patch.setattr(engine, "Graphs", Captured)
    patch.setattr(engine.Engine, "_why_not", "")
    patch.setattr(campaign, "make_bench", make_bench)
    choices = tuple(matmul_choice.Choice((0, 0), "", rows, 1.0, 2.0, True, True) for rows in matmul_choice.ROWS)
    patch.setattr(packed, "SMALLEST", 0)
    patch.setattr(packed, "covers", lambda quantizer, shape, device: quantizer.name in ("mxfp8", "nvfp4"))
    patch.setattr(packed, "choose", lambda *names, decoded: choices)
    patch.setattr(live_module, "packed_matmul", by_definition)
