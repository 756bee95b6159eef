"""The matmul of few BF16 rows has the library's bytes, on a GPU; which linears take it, everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.model import few, live
from onegrid.model.few import FewRows
from onegrid.model.live import LiveWeights
from onegrid.ops import few_cuda, matmul_choice
from onegrid.ops.linear import matmul
from onegrid.ops.operand import Operand
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.study import bench
from onegrid.sync import push
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import engine_of, plan_of, requests_of, snapshot_of


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """BF16 normal numbers, the same everywhere."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to("cuda", torch.bfloat16)


@pytest.mark.parametrize(
    "shape", [(8, 128), (40, 256), (1032, 640), (6144, 4096), (4096, 12288), (24576, 1024), (151936, 512)], ids=str
)
def test_few_rows_have_the_bytes_of_the_librarys_matmul(shape, gpu):
    assert few_cuda.covers(shape, gpu)
    w = Operand(draw(*shape, seed=1, scale=0.02))
    for rows in (16, 32, 48, 64):
        x = Operand(draw(rows, shape[1], seed=rows))
        assert_same_bytes(few_cuda.few_matmul(x, w), matmul(x, w), f"{rows} rows")
    x.values[3, 5], x.values[7, 0], w.values[2, 1] = torch.inf, -torch.inf, torch.nan
    have, want = few_cuda.few_matmul(x, w), matmul(x, w)
    assert torch.equal(have.isnan(), want.isnan())
    assert_same_bytes(have[~have.isnan()], want[~want.isnan()])


def test_rows_and_kinds_that_are_not_covered_are_refused(gpu):
    w = Operand(draw(64, 256))
    for x, what in (
        (Operand(draw(80, 256)), "80 rows"),
        (Operand(draw(17, 256)), "17 rows"),
        (Operand(draw(16, 128)), "128 numbers"),
        (Operand(draw(16, 256), "nvfp4", torch.ones(16, device=gpu)), "nvfp4 rows"),
    ):
        with pytest.raises(CapabilityError, match=what):
            few_cuda.few_matmul(x, w)
    assert not few_cuda.covers((60, 256), gpu) and not few_cuda.covers((64, 64), gpu)


def test_a_model_on_it_gives_the_bytes_of_the_library(gpu, monkeypatch):
    monkeypatch.setattr(few, "SMALLEST", 0)
    monkeypatch.setattr(matmul_choice, "BEYOND_CACHE", 1 << 20)
    monkeypatch.setattr(few, "own_rows", lambda found: frozenset(c.rows for c in found if c.same_bytes) | {48})
    shape = bench.SHAPES["tiny"] | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
    monkeypatch.setitem(bench.SHAPES, "wide", shape)
    rollouts = {}
    for weights in ("auto", "decoded"):
        engine = bench.engine("wide", "bf16", gpu, slots=64, max_len=48, weights=weights)
        assert (engine.weights.few is not None) == (weights == "auto")
        if engine.weights.few is not None:
            keys = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
            assert engine.weights.few.takes(keys, 32) and engine.weights.few.takes(keys, 48)
            assert all(choice.same_bytes for choice in engine.weights.choices)
        rollouts[weights] = engine.generate(bench.requests(37, prompt=5, new=12, vocab=512))
    for have, want in zip(rollouts["auto"], rollouts["decoded"], strict=True):
        assert_same_bytes(have.tokens_R, want.tokens_R)
        assert_same_bytes(have.logp_R, want.logp_R)


@pytest.mark.parametrize(
    ("preset", "taken"), [("bf16", {(128, 64), (192, 64), (64, 64), (64, 96)}), ("mxfp8", set()), ("nvfp4_all", set())]
)
def test_linears_in_bf16_take_it_alone_or_joined_and_no_other_does(preset, taken, monkeypatch):
    choices = tuple(matmul_choice.Choice((0, 0), "bf16", rows, 2.0, 1.0, True, True) for rows in matmul_choice.ROWS)
    monkeypatch.setattr(few, "SMALLEST", 0)
    monkeypatch.setattr(few, "covers", lambda shape, device: True)
    monkeypatch.setattr(few, "choose_few", lambda shape, device: choices)
    calls = []
    monkeypatch.setattr(live, "few_matmul", lambda a, b: calls.append(tuple(b.values.shape)) or matmul(a, b))
    spec, plan = plan_of("dense", preset)
    weights = LiveWeights(spec, plan, side="sampler")
    weights.few = FewRows(weights.held, weights.groups, weights.activation, weights.device)
    engine = Engine(weights, SamplerConfig(max_slots=24, max_len=64))
    push(snapshot_of(spec, plan, 0, version=0), engine)
    weights._join()
    have, want = engine.generate(requests_of(12)), engine_of("dense", preset, 0).generate(requests_of(12))
    assert_same_bytes([r.logp_R for r in have], [r.logp_R for r in want])
    assert set(calls) == taken
    assert engine.reads().read == engine.reads().proved


def test_a_choice_is_ours_only_where_both_measured_neighbours_are():
    def choice(rows: int, chosen: bool) -> matmul_choice.Choice:
        return matmul_choice.Choice((8, 128), "bf16", rows, 1.0, 2.0, True, chosen)

    assert matmul_choice.own_rows((choice(16, True), choice(32, True), choice(64, False))) == {16, 32}
    assert matmul_choice.own_rows((choice(16, False), choice(32, True), choice(64, True))) == {32, 48, 64}
