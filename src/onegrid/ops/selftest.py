"""Proof at start-up that on this device a row's bytes do not depend on its company, for the shapes of a model.

Libraries choose kernels by shape, processor and version, so the pins are a hope until this has run. It draws random
rows, computes them in the largest and in small batches, and compares bytes, operation by operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.formats import QUANTIZERS, Quantizer, quantize
from onegrid.ops.attention import attention
from onegrid.ops.grouped import Gather, dispatch, grouped_matmul, take
from onegrid.ops.linear import matmul
from onegrid.ops.logprob import log_probs, logits, rows_at_once
from onegrid.ops.native import native_matmul, native_operand, native_operand_of
from onegrid.ops.operand import Operand, operand
from onegrid.ops.packed_attention import segments_of
from onegrid.ops.pins import CHUNK, GPU_CHUNK, TILE, WORKSPACE, pin
from onegrid.ops.routing import NarrowLinear
from onegrid.ops.table import PLAIN, Kernels

BATCHES = (1, 2, TILE, TILE + 1, 5 * TILE, 16 * TILE)
"""Rows at which each operation is compared with the largest batch."""

NUM_STACKED = 4
"""Experts in the proof of grouped matmuls."""

STACKED_ROWS = 2048
"""Rows of that proof at most."""

NATIVE = {
    "native_block": ("fp8_1x128", "fp8_128x128"),
    "native_row": ("fp8_row", "fp8_row"),
    "native_tensor": (),
}
"""Formats of inputs and weights that stand for each kind of native product; one scale per tensor promises nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What the self-test saw."""

    device: str
    kernels: str
    """Name of the implementations, of `ops.table`."""
    instructions: str
    """Instruction set (CPU) or name of the chip: bits are promised within one of these."""
    torch: str
    operations: int
    seconds: float
    failed: tuple[str, ...]
    """Operation and shape of every difference; empty when the pins hold."""

    @property
    def passed(self) -> bool:
        """Whether rows are independent on this device."""
        return not self.failed

    def as_record(self) -> dict[str, object]:
        """For the run directory."""
        return asdict(self) | {"passed": self.passed}


def self_test(
    shapes: Iterable[tuple[int, int]],
    *,
    heads: tuple[int, int, int],
    vocabulary: int,
    hidden: int | None = None,
    stacked: Iterable[tuple[int, int]] = (),
    routers: Iterable[tuple[int, int]] = (),
    native: Mapping[str, Iterable[tuple[int, ...]]] = MappingProxyType({}),
    device: torch.device | str = "cpu",
    max_rows: int = 512,
    kernels: Kernels = PLAIN,
) -> Proof:
    """Compares rows alone, in small and in large batches, for every (out, in) of `shapes`.

    heads       query heads, key heads, width
    vocabulary  columns of the log-softmax, and of the logits from `hidden` (None: the narrowest width)
    stacked     shapes of experts, whose matmuls are grouped
    routers     shapes of matrices that choose experts, read in FP32
    native      shapes by kind of native operand, where a plan asks for native products
    max_rows    rows of the largest batch: those of the largest micro-batch
    kernels     the implementations both sides run on, of `ops.table`
    Never raises for a difference: read `Proof.failed`, or call `require`.
    """
    device = torch.device(device)
    began = time.perf_counter()
    pin(device)
    on = device if device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(device=on).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=on).to(device, torch.bfloat16)

    failed, count = [], 0

    def compare(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        nonlocal count
        count += 1
        whole = function(x)
        for rows in (r for r in BATCHES if r <= len(x)):
            for part in (slice(0, rows), slice(len(x) - rows, len(x))):
                if not same_bytes(function(x[part]), whole[part]):
                    failed.append(f"{name} at {rows} rows")
                    return

    if device.type == "cpu" and torch.tensor(2.0**-140).mul(1.0).item() == 0.0:
        failed.append("subnormal numbers are flushed to zero")
    for out, width in sorted(set(shapes)):
        weight = operand(draw(out, width), None)
        x = draw(max_rows, width)
        compare(f"matmul {out} x {width}", partial(_matmul, weight), x)
        if device.type == "cuda":  # formats with factors read FP32 sums, which is another kernel there
            compare(f"matmul {out} x {width} in FP32", partial(_matmul, weight, out_dtype=torch.float32), x)
    for out, width in sorted(set(stacked)):
        for quantizers in ((None, None), ("nvfp4_row", "nvfp4")):
            formats = [None if name is None else QUANTIZERS[name] for name in quantizers]
            weight = operand(draw(NUM_STACKED, out, width), formats[1])
            name = f"experts' matmul {out} x {width} of {quantizers[1] or 'bf16'}"
            compare(name, partial(_experts, weight, formats[0]), draw(min(max_rows, STACKED_ROWS), width))
    for out, width in sorted(set(routers)):
        router = draw(out, width)
        compare(f"router {out} x {width}", partial(_router, router), draw(max_rows, width))
    for kind, group in native.items():
        for out, width in sorted(set(group)) if NATIVE[kind] else ():
            activation, weight_format = (QUANTIZERS[name] for name in NATIVE[kind])
            weight = native_operand_of(quantize(draw(out, width), weight_format))
            name = f"native matmul {out} x {width} of {weight_format}"
            compare(name, partial(_native, weight, activation), draw(max_rows, width))
    widths = sorted({width for _, width in shapes})
    for width in widths:
        scale = draw(width)
        compare(f"norm of {width}", partial(_norm, kernels, scale), draw(max_rows, width))
    compare(f"swiglu of {widths[-1]}", lambda x: kernels.swiglu(x, x), draw(max_rows, widths[-1]))
    few = min(max_rows, max(BATCHES))
    compare(f"log-softmax of {vocabulary}", lambda x: log_probs(x.float(), 0.7), draw(few, vocabulary))
    head = draw(vocabulary, widths[0] if hidden is None else hidden)
    most = min(max_rows, max(few, rows_at_once(*head.shape)))  # as many as a learner takes
    compare(f"logits {vocabulary} x {head.shape[1]}", lambda x: logits(x, head), draw(most, head.shape[1]))
    failed += _attention_failures(draw, heads, kernels)
    return Proof(
        device=str(device),
        kernels=kernels.name,
        instructions=_instructions(device),
        torch=torch.__version__,
        operations=count + 1,
        seconds=time.perf_counter() - began,
        failed=tuple(failed),
    )


def _matmul(weight: Operand, x: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return matmul(operand(x, None), weight, out_dtype=out_dtype)


def _experts(weight: Operand, quantizer: Quantizer | None, x: Tensor) -> Tensor:
    """Every row through two experts that its own bits choose."""
    expert_NK = (x[:, :2].contiguous().view(torch.int16).to(torch.int64) >> 1) % NUM_STACKED
    places = dispatch(expert_NK, torch.ones(len(x), dtype=torch.bool, device=x.device), NUM_STACKED)
    a = operand(x, quantizer)
    row = None if a.row is None else take(a.row, places.source)
    return Gather.apply(grouped_matmul(Operand(take(a.values, places.source), a.kind, row), weight, places), places)


def _router(router: Tensor, x: Tensor) -> Tensor:
    return NarrowLinear.apply(x, router)


def _native(weight: Operand, quantizer: Quantizer, x: Tensor) -> Tensor:
    return native_matmul(native_operand(x, quantizer), weight)


def _norm(kernels: Kernels, scale: Tensor, x: Tensor) -> Tensor:
    return kernels.norm(x, scale, 1e-6)


def require(proof: Proof) -> None:
    """Raises CapabilityError naming the operations whose rows depend on their company."""
    if not proof.passed:
        early = f"; if something multiplied on the GPU before the pins were set, set {WORKSPACE} in the environment"
        hint = early if proof.device.startswith("cuda") else ""
        raise CapabilityError(
            f"on {proof.instructions} with torch {proof.torch} rows depend on their batch in: "
            f"{', '.join(proof.failed)}; learner and sampler could differ{hint}"
        )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bytes."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _attention_failures(draw: Callable[..., Tensor], heads: tuple[int, int, int], kernels: Kernels) -> list[str]:
    """Three packed sequences against one alone, and decode of single positions against prefill."""
    num_heads, num_groups, width = heads
    name = f"attention of {num_heads}/{num_groups} heads of {width}"
    chunk = CHUNK if kernels.slots is None else GPU_CHUNK
    length = 2 * chunk + 5
    q, k, v = (draw(3 * length, count, width) for count in (num_heads, num_groups, num_groups))
    firsts = [length * i for i in range(3)]
    whole = kernels.packed_attention(q, k, v, segments_of(firsts, [length] * 3, 3 * length, q.device))
    last = slice(2 * length, 3 * length)
    alone = kernels.packed_attention(q[last], k[last], v[last], segments_of([0], [length], length, q.device))
    if not same_bytes(alone, whole[last]):
        return [f"{name}, packed"]
    for position in (0, chunk - 1, chunk, length - 1):
        rows = torch.tensor(firsts, device=q.device) + position
        for some in (slice(0, 3), slice(2, 3)):
            out = _decoded(kernels, *(t.view(3, length, -1, width)[some] for t in (q, k, v)), position=position)
            if not same_bytes(out, whole[rows[some]]):
                return [f"{name}, decode at position {position}"]
    return []


def _decoded(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, *, position: int) -> Tensor:
    """The query at `position` of every sequence [S, L, heads, width], by the decode path: [S, H, D]."""
    position_S = torch.full((len(q),), position, dtype=torch.int64, device=q.device)
    if kernels.slots is None:
        return attention(q[:, position : position + 1], k, v, position_S)[:, 0]
    keys, values = (t.transpose(1, 2).contiguous() for t in (k, v))
    return kernels.slots(q[:, position], k[:, position], v[:, position], keys, values, position_S)


def _instructions(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()
