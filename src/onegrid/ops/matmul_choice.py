"""Which matmul few rows take, the library's or one of ours: measured at start-up, among equals in bytes only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS, Quantizer, quantize
from onegrid.ops.arranged import MOST_ROWS
from onegrid.ops.capture import capturing, early_launches
from onegrid.ops.chains import triton_norm
from onegrid.ops.few_cuda import few_matmul
from onegrid.ops.linear import matmul
from onegrid.ops.operand import Operand, operand, operand_of
from onegrid.ops.packed_cuda import Packed, packed_matmul
from onegrid.ops.pins import pin

ROWS = (16, 32, MOST_ROWS)
"""Batches that are measured; one between two of them is taken where both are."""

SMALLEST = 1 << 20
"""Weights below this many numbers are left to the library, unmeasured: compiling would cost more than it gives."""

BEYOND_CACHE = 192 << 20
"""Bytes of different weights that a measurement walks through, so that none is found in a cache."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One measured matmul."""

    shape: tuple[int, int]
    """(N, K) of the weight."""
    weight: str
    """A quantizer's name, or "bf16"."""
    rows: int
    library_us: float
    """Of the library's matmul on decoded weights behind the kernel that makes its rows, as in a step, where one may
    begin before the other has ended; and of decoding them where they are not kept."""
    own_us: float
    """Of ours behind the same kernel: of packed weights, or of few rows where weights are BF16."""
    same_bytes: bool
    chosen: bool
    """Ours: its bytes are the library's, and it is faster or decoded weights are not kept."""


@lru_cache(maxsize=256)
def choose(
    shape: tuple[int, int], weight: str, activation: str, device: torch.device, *, decoded: bool = True
) -> tuple[Choice, ...]:
    """Measures packed random weights of `shape` at every batch of ROWS. Quantizers by name.

    decoded  whether decoded weights are kept, or each matmul without packed ones would decode its own
    """
    draw = _drawing(device)
    q = quantize(draw(*shape, scale=0.02), QUANTIZERS[weight])
    whole = operand_of(q)
    row = None if whole.row is None else whole.row.contiguous()
    whole = Operand(whole.values, whole.kind, row)
    copies = [
        Packed(q.codes.clone(), q.scales.clone(), q.quantizer, shape)
        for _ in range(-(-BEYOND_CACHE // (q.codes.nbytes + q.scales.nbytes)))
    ]
    others: list[Callable[[], Operand]] = [
        partial(operand_of, replace(q, codes=packed.codes, scales=packed.scales)) for packed in copies
    ]
    if decoded:
        each = [Operand(whole.values.clone(), whole.kind, row) for _ in range(-(-BEYOND_CACHE // whole.values.nbytes))]
        others = [partial(_itself, other) for other in each]
    found = []
    for rows in ROWS:
        x, quantizer = draw(rows, shape[1]), QUANTIZERS[activation]
        a = operand(x, quantizer)
        want, have = matmul(a, whole), packed_matmul(a, copies[0], row)
        same = torch.equal(want.view(torch.int16), have.view(torch.int16))
        slow = _microseconds([partial(_read_and_multiply, x, quantizer, other) for other in others])
        fast = _microseconds([partial(_multiply_packed, x, quantizer, packed, row) for packed in copies])
        found.append(Choice(shape, weight, rows, slow, fast, same, same and (fast < slow or not decoded)))
    return tuple(found)


@lru_cache(maxsize=256)
def choose_few(shape: tuple[int, int], device: torch.device) -> tuple[Choice, ...]:
    """The same of BF16 weights: `few_matmul` against the library's, both behind RMSNorm."""
    draw = _drawing(device)
    copies = [Operand(draw(*shape, scale=0.02)) for _ in range(-(-BEYOND_CACHE // (2 * shape[0] * shape[1])))]
    gain, found = draw(shape[1]), []
    for rows in ROWS:
        x = draw(rows, shape[1])
        want, have = (multiply(Operand(x), copies[0]) for multiply in (matmul, few_matmul))
        same = torch.equal(want.view(torch.int16), have.view(torch.int16))
        slow, fast = (
            _microseconds([partial(_norm_and_multiply, multiply, x, gain, b) for b in copies])
            for multiply in (matmul, few_matmul)
        )
        found.append(Choice(shape, "bf16", rows, slow, fast, same, same and fast < slow))
    return tuple(found)


def _drawing(device: torch.device) -> Callable[..., Tensor]:
    """BF16 normal numbers of a size, times `scale`, always the same."""
    pin(device)
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=generator, device=device) * scale).to(torch.bfloat16)

    return draw


def own_rows(choices: tuple[Choice, ...]) -> frozenset[int]:
    """Numbers of rows, multiples of 16, whose matmul is ours."""
    good = {choice.rows: choice.chosen for choice in choices}
    return frozenset(
        rows
        for rows in range(16, MOST_ROWS + 1, 16)
        if all(good[near] for near in (max(r for r in ROWS if r <= rows), min(r for r in ROWS if r >= rows)))
    )


def _itself(kept: Operand) -> Operand:
    return kept


def _norm_and_multiply(multiply: Callable[..., Tensor], x: Tensor, gain: Tensor, b: Operand) -> Tensor:
    return multiply(Operand(triton_norm(x, gain, 1e-6)), b)


def _read_and_multiply(x: Tensor, quantizer: Quantizer, read: Callable[[], Operand]) -> Tensor:
    return matmul(operand(x, quantizer), read())


def _multiply_packed(x: Tensor, quantizer: Quantizer, packed: Packed, row: Tensor | None) -> Tensor:
    return packed_matmul(operand(x, quantizer), packed, row)


def _microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Least of five: one of `calls`, on average, under a graph."""
    with early_launches():
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph), early_launches():
        for call in calls:
            call()
    times = []
    for _ in range(6):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3 / len(calls))
    graph.reset()
    return min(times[1:])
