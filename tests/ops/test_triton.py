"""The Triton implementations keep the promise of their row in ops/table.py. All of this needs a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onegrid.errors import CapabilityError, ConfigError
from onegrid.formats import QUANTIZERS
from onegrid.ops import chains, producers
from onegrid.ops import table as kernels_of
from onegrid.ops.activation import swiglu
from onegrid.ops.norm import rms_norm
from onegrid.ops.packed_attention import Segments, packed_attention, segments_of, triton_packed_attention
from onegrid.ops.table import PLAIN, TABLE, kernels_for
from tests.bytes import assert_same_bytes

HEADS = [(4, 2, 16), (9, 3, 64), (16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 8, 256), (32, 1, 32)]
LENGTHS = [1, 63, 257, 700, 64, 1500]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """BF16 normal numbers, the same everywhere."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to("cuda", torch.bfloat16)


def packed(heads: tuple[int, int, int], lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Segments]:
    """q, k, v with gaps between sequences, and where they lie."""
    num_heads, num_groups, width = heads
    firsts, at = [], 3
    for length in lengths:
        firsts.append(at)
        at += length + 5
    q, k, v = (draw(at, n, width, seed=i) for i, n in enumerate((num_heads, num_groups, num_groups)))
    return q, k, v, segments_of(firsts, lengths, at, "cuda")


def test_every_row_of_the_table_names_a_function_and_every_operation_has_a_definition():
    import importlib

    for row in TABLE:
        part, module, name = f"ops.{row.where}".split(".")[-3:]
        if not module.endswith("_triton"):
            assert callable(getattr(importlib.import_module(f"onegrid.{part}.{module}"), name))
        assert any(r.operation == row.operation and r.promise == "definition" for r in TABLE)


SOURCE = Path(kernels_of.__file__).parents[1]
KERNELS = sorted([*SOURCE.glob("*/*_triton.py"), *SOURCE.glob("*/*.cu")])
KERNELS = [path for path in KERNELS if "__global__" in (text := path.read_text("utf-8")) or "triton.jit" in text]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: path.name)
def test_no_kernel_lacks_a_row_and_none_adds_in_an_order_that_chance_decides(kernel):
    named = {tuple(f"ops.{row.where}".split(".")[-3:-1]) for row in TABLE if row.promise != "definition"}
    callers = [SOURCE / part / f"{module}.py" for part, module in named]
    name = kernel.name if kernel.suffix == ".cu" else kernel.stem
    assert kernel in callers or any(name in path.read_text(encoding="utf-8") for path in callers)
    text = kernel.read_text(encoding="utf-8")
    text = re.sub(r"atomicAdd\([^()]*, \(u64\)\w+\)", "", text)  # whole numbers may come in any order
    assert not re.search(r"atomic_\w+\(|atomic[A-Z]\w+\(|\bred\.", text)


def test_a_cpu_gets_the_definitions_and_an_impossible_wish_is_refused():
    shape = {"num_heads": 4, "num_groups": 2, "head_dim": 16}
    assert kernels_for("cpu", **shape) is PLAIN
    with pytest.raises(CapabilityError, match="NVIDIA GPU"):
        kernels_for("cpu", **shape, choice="triton")
    with pytest.raises(ConfigError, match="auto"):
        kernels_for("cpu", **shape, choice="fast")


def test_shapes_outside_the_table_fall_back_loudly(gpu):
    with pytest.warns(UserWarning, match="widths"):
        assert kernels_for(gpu, num_heads=4, num_groups=2, head_dim=24) is PLAIN


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_attention_is_within_its_bound(heads, gpu):
    q, k, v, segments = packed(heads, LENGTHS)
    out = triton_packed_attention(q, k, v, segments).double()
    plain = packed_attention(q, k, v, segments).double()
    for first, length in zip(segments.first_B.tolist(), segments.length_B.tolist(), strict=True):
        rows = slice(first, first + length)
        one = [t[rows].double().transpose(0, 1) for t in (q, k, v)]
        repeat = heads[0] // heads[1]
        k64, v64 = (t.repeat_interleave(repeat, 0) for t in one[1:])
        want = torch.nn.functional.scaled_dot_product_attention(one[0], k64, v64, is_causal=True).transpose(0, 1)
        # Each weight is rounded to BF16 (2^-9 relative), in numerator and denominator, so the average of values v
        # moves by at most 2 * 2^-9 max|v|; then one rounding of the result, 2^-9 of it; FP32 sums are far below.
        bound = 2.0**-8 * v64.abs().max() + 2.0**-9 * want.abs() + 1e-4
        assert ((out[rows] - want).abs() <= bound).all()
        assert ((out[rows] - plain[rows]).abs() <= 2 * bound).all()
    inside = torch.zeros(len(q), dtype=torch.bool, device="cuda")
    for first, length in zip(segments.first_B.tolist(), segments.length_B.tolist(), strict=True):
        inside[first : first + length] = True
    assert not out[~inside].any()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_sequence_alone_equals_the_sequence_in_a_pack(heads, gpu):
    q, k, v, segments = packed(heads, LENGTHS)
    whole = triton_packed_attention(q, k, v, segments)
    for first, length in zip(segments.first_B.tolist(), segments.length_B.tolist(), strict=True):
        for shown in {length, max(1, length // 2)}:  # a prefix too
            rows = slice(first, first + shown)
            alone = triton_packed_attention(q[rows], k[rows], v[rows], segments_of([0], [shown], shown, "cuda"))
            assert_same_bytes(alone, whole[rows], f"{length}, first {shown}")


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("speed", [(4, 3), (1, 2), (2, 2), (8, 2)], ids=str)
def test_decode_equals_prefill(heads, speed, gpu):
    from onegrid.ops import attention_triton

    warps, stages = speed
    num_heads, num_groups, width = heads
    if width == 256:
        stages = 1
    length = 1100
    q, k, v = (draw(length, n, width, seed=i, scale=1.5) for i, n in enumerate((num_heads, num_groups, num_groups)))
    whole = triton_packed_attention(q, k, v, segments_of([0], [length], length, "cuda"))
    positions = torch.tensor([0, 1, 15, 63, 64, 65, 127, 255, 256, 257, 511, 512, 700, 1023, 1024, 1099], device="cuda")
    count = len(positions)
    keys, values = (torch.full((count, num_groups, 1280, width), 7.0, device="cuda").bfloat16() for _ in range(2))
    keys[:, :, :length], values[:, :, :length] = k.transpose(0, 1), v.transpose(0, 1)
    for splits in (None, 0, 1, 3, 5):
        out = attention_triton.decode(q[positions], keys, values, positions, warps=warps, stages=stages, splits=splits)
        assert_same_bytes(out, whole[positions], f"splits {splits}")
    one = attention_triton.decode(q[positions[-1:]], keys[-1:], values[-1:], positions[-1:])
    assert_same_bytes(one, whole[positions[-1:]])
    for at in positions.tolist():
        keys[(positions < at).nonzero().flatten(), :, at:] = 1e30  # what no query sees changes nothing
    assert_same_bytes(attention_triton.decode(q[positions], keys, values, positions), whole[positions])


@pytest.mark.parametrize("splits", [0, 1, 2])
def test_decode_that_sends_for_keys_before_it_may_begin_uses_what_is_written_right_before_it(splits, gpu):
    from onegrid.ops import attention_triton, fused_triton
    from onegrid.ops.capture import capturing, early_launches

    length, firsts = 600, [1, 64, 250]
    q, k, v = (draw(length, n, 128, seed=i) for i, n in enumerate((8, 2, 2)))
    angle = draw(length, 64, seed=3).float()
    rope, every = (angle.cos(), angle.sin()), torch.arange(length, device="cuda")
    q_turned, k_turned = fused_triton.heads(q, k, None, None, 1e-6, rope, every)
    want = triton_packed_attention(q_turned, k_turned, v, segments_of([0], [length], length, "cuda"))
    keys, values = (torch.full((3, 2, 640, 128), torch.nan, device="cuda").bfloat16() for _ in range(2))
    for slot, first in enumerate(firsts):
        keys[slot, :, :first] = k_turned[:first].transpose(0, 1)
        values[slot, :, :first] = v[:first].transpose(0, 1)
    position = torch.tensor(firsts, device="cuda") - 1

    def step() -> Tensor:
        after = position + 1
        q_now, k_now = fused_triton.heads(q[after], k[after], None, None, 1e-6, rope, after)
        v_now = v[after]
        position.copy_(after)  # the kernel right before: what decode read too early is one position behind
        return attention_triton.decode(q_now, keys, values, position, new=(k_now, v_now), splits=splits)

    with early_launches():
        step()  # compiles
    position -= 1
    graph = torch.cuda.CUDAGraph()
    with capturing(graph), early_launches():
        out = step()
    found = []
    for _ in range(length - firsts[-1]):
        graph.replay()
        found.append((position.clone(), out.clone()))
    for at, have in found:
        assert_same_bytes(have, want[at], str(at.tolist()))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_gradients_are_those_of_float64_and_the_same_every_time(heads, gpu):
    q, k, v, segments = packed(heads, [1, 63, 257, 300])
    dout = draw(*q.shape, seed=9)

    def gradients() -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        triton_packed_attention(*inputs, segments).backward(dout)
        return [t.grad for t in inputs]

    found = gradients()
    assert_same_bytes(gradients(), found)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    repeat = heads[0] // heads[1]
    for first, length in zip(segments.first_B.tolist(), segments.length_B.tolist(), strict=True):
        rows = slice(first, first + length)
        one, two, three = (t[rows].transpose(0, 1) for t in wide)
        two, three = two.repeat_interleave(repeat, 0), three.repeat_interleave(repeat, 0)
        out = torch.nn.functional.scaled_dot_product_attention(one, two, three, is_causal=True).transpose(0, 1)
        total = total + (out * dout[rows].double()).sum()
    total.backward()
    for have, want in zip(found, wide, strict=True):
        # P, dS and the result are rounded to BF16, 2^-9 each; relative to the norm that leaves well under 2^-6.
        assert (have.double() - want.grad).norm() <= 2.0**-6 * want.grad.norm()


@pytest.mark.parametrize("width", [64, 96, 1024, 4096])
def test_norms_of_rows_depend_on_the_row_only_and_agree_with_the_definition(width, gpu):
    x, y, w = draw(150, width), draw(150, width, seed=1), draw(width, seed=2)
    total, out = chains.triton_residual_norm(x, y, w, 1e-6)
    assert_same_bytes(total, x + y)
    assert_same_bytes(chains.triton_norm(total, w, 1e-6), out)
    for part in (slice(0, 1), slice(7, 24), slice(149, 150)):
        assert_same_bytes(chains.triton_residual_norm(x[part], y[part], w, 1e-6)[1], out[part])
    # Two FP32 sums of `width` squares differ by far less than half an ulp of BF16: at most neighbours.
    want = rms_norm(x + y, w, 1e-6)
    assert torch.allclose(out.float(), want.float(), rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("width", [16, 64, 128])
def test_heads_are_normed_and_rotated_as_defined(normed, width, gpu):
    q, k, w = draw(70, 6, width), draw(70, 2, width, seed=1), draw(width, seed=2)
    rope = tuple(torch.randn(90, width // 2, device="cuda") for _ in range(2))
    position = torch.arange(70, device="cuda") + 5
    weights = (w, w.flip(0)) if normed else (None, None)
    got = chains.triton_heads(q, k, *weights, 1e-6, rope, position)
    want = chains.heads(q, k, *weights, 1e-6, rope, position)
    for have, expected in zip(got, want, strict=True):
        if normed:  # the norm may differ by a neighbour, the rotation adds two of them
            assert torch.allclose(have.float(), expected.float(), rtol=2.0**-6, atol=2.0**-5)
        else:
            assert_same_bytes(have, expected)
    part = slice(31, 33)
    alone = chains.triton_heads(q[part], k[part], *weights, 1e-6, rope, position[part])
    assert_same_bytes(alone, [t[part] for t in got])


def test_swiglu_has_the_bytes_of_its_definition(gpu):
    gate, up = draw(40, 1500, scale=6.0), draw(40, 1500, seed=1)
    assert_same_bytes(chains.triton_swiglu(gate, up), swiglu(gate, up))
    every = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()][None]
    assert_same_bytes(chains.triton_swiglu(every, torch.ones_like(every)), swiglu(every, torch.ones_like(every)))


def test_swiglu_takes_the_places_of_a_whole_micro_batch_of_experts(gpu):
    gate, up = draw(70_000, 32), draw(70_000, 32, seed=1)  # 8,192 tokens to 8 experts each are more than 65,535 rows
    assert_same_bytes(chains.triton_swiglu(gate, up), swiglu(gate, up))
    for name in ("mxfp8", "nvfp4_row"):
        have = producers.triton_gated(gate, up, QUANTIZERS[name])
        assert_same_bytes(have.values, producers.gated(gate, up, QUANTIZERS[name]).values, name)


def test_gradients_of_chains_are_those_of_their_definitions(gpu):
    x, y, w = draw(33, 4, 64), draw(33, 4, 64, seed=1), draw(64, seed=2)
    rope = tuple(torch.randn(40, 32, device="cuda") for _ in range(2))
    position = torch.arange(33, device="cuda")
    fast_ones = [
        lambda a, b, c: chains.triton_residual_norm(a.flatten(1), b.flatten(1), c.repeat(4), 1e-6),
        lambda a, b, c: chains.triton_heads(a, b, c, c, 1e-6, rope, position),
        lambda a, b, c: (chains.triton_swiglu(a.flatten(1), b.flatten(1)), chains.triton_norm(a, c, 1e-6)),
    ]
    plain = [
        lambda a, b, c: chains.residual_norm(a.flatten(1), b.flatten(1), c.repeat(4), 1e-6),
        lambda a, b, c: chains.heads(a, b, c, c, 1e-6, rope, position),
        lambda a, b, c: (swiglu(a.flatten(1), b.flatten(1)), rms_norm(a, c, 1e-6)),
    ]
    for fast, slow in zip(fast_ones, plain, strict=True):
        grads = []
        for function in (fast, slow):
            inputs = [t.clone().requires_grad_() for t in (x, y, w)]
            out = function(*inputs)
            sum((o.float() * draw(*o.shape, seed=7 + i).float()).sum() for i, o in enumerate(out)).backward()
            grads.append([t.grad.float() for t in inputs])
        for have, want in zip(*grads, strict=True):
            # The same FP32 formulas; forward values that are BF16 neighbours move a gradient by 2^-8 of its size.
            assert (have - want).norm() <= 2.0**-6 * want.norm()
