"""Kernels at shapes that models do not have, in Triton's interpreter on a CPU: `test_interpreted.py` runs this file.

The interpreter has no assembly, no BF16 constants and no BF16 products, so it gets them here; FP32 products of it are
as wide as NumPy's, and sums of them are compared within a bound, not as bytes.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from onegrid.errors import CapabilityError, FormatError
from onegrid.formats import QUANTIZERS, decode, elements, quantize, quantize_decode
from onegrid.model.live import send
from onegrid.ops import (
    attention_triton,
    decode_triton,
    draw_triton,
    experts_triton,
    fused_triton,
    grouped_triton,
    note_triton,
    quantize_triton,
)
from onegrid.ops.arranged import arranged, room
from onegrid.ops.draw import draw, uniform
from onegrid.ops.grouped import bring_back, by_expert, dispatch, rows_of, take, wgrad_by_expert
from onegrid.ops.operand import Operand, operand
from onegrid.ops.producers import fuses
from onegrid.ops.routing import route
from tests.bytes import assert_same_bytes
from tests.ops import numbers_triton
from tests.ops.test_note import assert_notes_as_rows_do
from tests.sampler.test_draw import any_streams

np.seterr(all="ignore")
generator = torch.Generator().manual_seed(0)


@triton.jit
def product(x, y):
    return x * y


@triton.jit
def exp(x):
    return tl.exp(x)


class Library:
    exp = exp


def constant(self, value):
    return TensorHandle(np.array([np.float32(value).view(np.uint32) >> 16], dtype=np.uint16), tl.bfloat16)


def wide(handle):
    bits = handle.data.astype(np.uint32) << 16 if handle.dtype.scalar == tl.bfloat16 else None
    return (handle.data if bits is None else bits.view(np.float32)).astype(np.float64)


def dot(self, a, b, d, *_):
    return TensorHandle((wide(a) @ wide(b) + d.data).astype(np.float32), d.dtype.scalar)


def cast(self, x, to, cut=InterpreterBuilder.cast_impl):
    """Rounded, where Triton 3.6's interpreter cuts FP32 to BF16."""
    if (x.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
        return cut(self, x, to)
    rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16()
    return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


def index(tensor, scope, patch=interpreter._patch_lang_tensor):
    """NumPy 2.4 makes no number of an array of one; Triton 3.6 asks it to."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = index
InterpreterBuilder.get_bf16, InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = constant, dot, cast
fused_triton._mul = experts_triton._mul = product
fused_triton.libdevice, draw_triton.libdevice = Library, Library
grouped_triton.EXACT = tl.constexpr(False)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).bfloat16()


def same(have: Tensor, want: Tensor) -> bool:
    """As BF16 bytes; any NaN is as good as another, since the interpreter has its own."""
    one, other = have.to(torch.bfloat16), want.to(torch.bfloat16)
    both = one.isnan() & other.isnan()
    return bool(((one.view(torch.int16) == other.view(torch.int16)) | both).all())


def attention() -> None:
    """Sequences of no, one, CHUNK and CHUNK + 1 tokens; seven query heads to a key head, and two."""
    chunk = attention_triton.CHUNK
    for heads, groups, width in ((7, 1, 16), (8, 4, 16)):
        for lengths in ([chunk], [chunk + 1], [65, 1, 0, 64]):
            firsts = [sum(lengths[:i]) + 3 * i for i in range(len(lengths))]
            num = sum(lengths) + 3 * len(lengths)
            q, k, v = (normal(num, n, width) for n in (heads, groups, groups))
            out, _ = attention_triton.prefill(q, k, v, torch.tensor(firsts), torch.tensor(lengths), max(lengths))
            live = [(first, length) for first, length in zip(firsts, lengths, strict=True) if length]
            nobody = torch.ones(num, dtype=torch.bool)
            keys, values = normal(len(live) + 1, groups, 2 * chunk, width), normal(len(live) + 1, groups, 512, width)
            for slot, (first, length) in enumerate(live):
                rows = slice(first, first + length)
                nobody[rows] = False
                parts = [x[rows].float().transpose(0, 1).repeat_interleave(heads // x.shape[1], 0) for x in (q, k, v)]
                exact = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1)
                assert (out[rows].float() - exact).abs().max() < 2.0**-7 * (1 + v.float().abs().max())
                keys[slot, :, : length - 1] = k[first : first + length - 1].transpose(0, 1)
                values[slot, :, : length - 1] = v[first : first + length - 1].transpose(0, 1)
            assert not out[nobody].any()
            last = torch.tensor([first + length - 1 for first, length in live])
            position = torch.tensor([length - 1 for _, length in live])
            for splits in (3,):
                new = (k[last], v[last])
                got = attention_triton.decode(q[last], keys.clone(), values.clone(), position, new=new, splits=splits)
                assert same(got, out[last]), (heads, groups, lengths, splits)
    for heads, groups, width in ((2, 1, 80), (2, 1, 96), (3, 2, 64)):
        try:
            q, k, v = normal(4, heads, width), normal(4, groups, width), normal(4, groups, width)
            attention_triton.prefill(q, k, v, torch.tensor([0]), torch.tensor([4]), 4)
        except CapabilityError:
            continue
        raise AssertionError(f"{heads} over {groups} of {width} was not refused")


def decoding() -> None:
    """Positions beside the borders of tiles and chunks, 1, 4 and 8 query heads to a key head, any split."""
    positions = [0, 63, 64, 255, 256, 321]
    for heads, groups in ((1, 1), (4, 1), (8, 1)):
        q, k, v = (normal(322, n, 16) for n in (heads, groups, groups))
        want, _ = attention_triton.prefill(q, k, v, torch.tensor([0]), torch.tensor([322]), 322)
        for num_keys, all_splits in ((256, (None,)), (328, (0, 2))):
            at = torch.tensor([p for p in positions if p < num_keys])
            shape = (len(at), groups, num_keys, 16)
            full = [torch.full(shape, 1e30).bfloat16() for _ in range(2)]
            for slots, x in zip(full, (k, v), strict=True):
                for slot, position in enumerate(at.tolist()):
                    slots[slot, :, : position + 1] = x[: position + 1].transpose(0, 1)
            if num_keys > 256:
                assert same(attention_triton.decode(q[at], *full, at), want[at]), heads
            for splits in all_splits:
                held = [x.clone() for x in full]
                for x in held:
                    x[torch.arange(len(at)), :, at] = float("nan")  # nobody may read what was there before
                got = attention_triton.decode(q[at], *held, at, new=(k[at], v[at]), splits=splits)
                assert same(got, want[at]), (heads, splits, num_keys)
                assert all(map(same, held, full))


def columns_and_codes() -> None:
    """Any bits, one column, transposed inputs; any codes of every quantizer that the kernel says it covers."""
    counts = [0, 0]
    for name, quantizer in QUANTIZERS.items():
        for rows, width in ((32, 1), (128, 33)):
            bits = torch.randint(-(1 << 15), 1 << 15, (rows, width), generator=generator).to(torch.int16)
            for x in (bits.view(torch.bfloat16), normal(width, rows).t(), normal(rows, width).float() * 1e-30):
                if quantize_triton.covers_columns(x, quantizer):
                    want = quantize_decode(x, quantizer, axis=-2).values
                    assert same(quantize_triton.columns(x, quantizer), want), (name, rows, width)
                    counts[0] += 1
        for shape in ((65, 160), (3, 32, 128)):
            try:
                q = quantize(normal(*shape), quantizer)
            except FormatError:
                continue
            codes = torch.randint(0, 256, q.codes.shape, dtype=torch.uint8, generator=generator)
            q = dataclasses.replace(q, codes=codes)
            with mock.patch.object(Tensor, "is_cuda", True):
                covered = decode_triton.covers(q)
            if covered:
                want = decode(q) if quantizer.matmul in ("decoded", "nvfp4") else elements(q)
                assert same(decode_triton.values(q), want), (name, shape)
                counts[1] += 1
    assert counts[0] >= 15 and counts[1] >= 60, counts


def chains() -> None:
    """No row, one row, NaN and Inf, widths that are no power of two, numbers of a row that do not lie together."""
    for name in ("mxfp8", "mxfp4", "nvfp4_row", "fp8_1x128"):
        quantizer = QUANTIZERS[name]
        block = quantizer.block[1] or 1
        assert not fuses(quantizer, block + 1) and not fuses(quantizer, 16_384 + block)
        for width in (5 * block, 1024 + block):
            for rows in (0, 1, 5, 16):
                quantize_triton.room = torch.empty_like if rows == 16 else room
                x, y, weight = normal(width, rows).t(), normal(rows, 2 * width)[:, width:], normal(width)
                if rows > 2:
                    x[1, 3], y[2, 1] = float("inf"), float("nan")
                total, values, amax, ordered = quantize_triton.residual_norm(x, y, weight, 1e-6, quantizer)
                plain, h = fused_triton.residual_norm(x.contiguous(), y.contiguous(), weight, 1e-6)
                assert same(total, plain) and same(fused_triton.norm(total, weight, 1e-6), h)
                assert same(fused_triton.norm(total.t().contiguous().t(), weight, 1e-6), h)
                gate = fused_triton.swiglu(x.contiguous(), y.contiguous())
                assert same(fused_triton.swiglu(x, y), gate)
                if rows == 16:
                    assert same(ordered.contiguous(), arranged(values)), (name, width)
                gated, gate_amax = quantize_triton.swiglu(x, y, quantizer)
                for have, largest, of in ((values, amax, h), (gated, gate_amax, gate)):
                    want = quantize_decode(of, quantizer)
                    assert same(have, want.values), (name, width, rows)
                    assert largest is None or same(largest, want.amax)
    q, k, position = normal(5, 16, 3).mT, normal(5, 16, 1).mT, torch.arange(5)
    rope = (torch.randn(9, 8, generator=generator), torch.randn(9, 8, generator=generator))
    apart = fused_triton.heads(q, k, None, None, 1e-6, rope, position)
    together = fused_triton.heads(q.contiguous(), k.contiguous(), None, None, 1e-6, rope, position)
    assert all(map(same, apart, together))


def experts() -> None:
    """One expert, all experts, all tokens to few of them, one token; widths of no multiple."""
    for num, top_k, out, width in ((1, 1, 48, 64), (5, 5, 17, 33)):
        for tokens in (1, 17):
            for name, weight in ((None, None), ("nvfp4_row", "nvfp4"), ("fp8_row", "fp8_row")):
                x, w = normal(tokens, width), normal(num, out, width)
                expert = torch.randperm(num, generator=generator)[:top_k].expand(tokens, top_k).contiguous()
                places = dispatch(expert, torch.ones(tokens, dtype=torch.bool), num)
                a = send(operand(x, None if name is None else QUANTIZERS[name]), places)
                b = operand(w, None if weight is None else QUANTIZERS[weight])
                want = by_expert(a, b, places).float()
                half = [Operand(o.values.bfloat16(), o.kind, o.row, o.block) for o in (a, b)]
                owned = places.pair < expert.numel()
                error = (grouped_triton.grouped_matmul(*half, places).float() - want)[owned].abs().max()
                assert error <= 2.0**-7 * want.abs().max(), (num, tokens, name)
            dy, sent = normal(len(places.source), out), take(x, places.source)
            want = wgrad_by_expert(dy.float(), sent.float(), places)
            assert (grouped_triton.grouped_wgrad(dy, sent, places) - want).abs().max() < 1e-3


def moves() -> None:
    """Experts that tie, rows of NaN, one expert, rows that go nowhere, results of experts that nobody asked."""
    for num, top_k, tokens, width, tile in (
        (1, 1, 5, 16, 16),
        (5, 3, 9, 1030, 4),
        (20, 8, 16, 48, 16),
        (7, 7, 1, 8, 1),
    ):
        probability = torch.softmax((torch.randn(tokens, num, generator=generator) * 2).round(), dim=-1)
        probability[tokens // 2] = torch.nan
        for normalize in (False, True):
            expert, weight = experts_triton.choose(probability, top_k=top_k, normalize=normalize)
            with mock.patch("onegrid.ops.routing._probabilities", lambda p, _: p):
                want = route(probability, probability, top_k=top_k, normalize=normalize)
            assert torch.equal(expert, want[0]), (num, top_k)
            assert torch.equal(weight.nan_to_num(-1.0), want[1].nan_to_num(-1.0)), (num, top_k, normalize)
        for mask in (None, torch.rand(tokens, generator=generator) < 0.7, torch.zeros(tokens, dtype=torch.bool)):
            want = dispatch(expert, mask, num, tile=tile)
            used, room_of = len(want.pair), len(want.pair) + 19
            have = experts_triton.dispatch(expert, mask, num, room_of, tile)
            assert torch.equal(have.end_E, want.end_E) and torch.equal(have.pair[:used], want.pair)
            assert torch.equal(have.source[:used], want.source)
            assert (have.pair[used:] == expert.numel()).all() and (have.source[used:] == tokens).all()
            assert torch.equal(have.place_NK, torch.where(want.place_NK == used, room_of, want.place_NK))
            y, extra = normal(room_of, width), torch.randn(tokens, width, generator=generator)
            for more in (None, extra):
                assert same(experts_triton.bring_back(y, have, weight, more), bring_back(y, have, weight, more))
        codes = torch.randint(0, 256, (tokens, width), dtype=torch.uint8, generator=generator)
        index = torch.randint(0, tokens + 1, (3, 5), generator=generator)
        for x in (normal(tokens, 2, width), normal(width, tokens).t(), torch.arange(tokens), codes, codes.float()):
            assert_same_bytes(experts_triton.take(x, index), rows_of(x, index))


def steps() -> None:
    """Uniform numbers of any stream, draws from a few ids and from many, and what a step notes of them."""
    here = torch.device("cpu")
    stream, position = any_streams(here)
    assert_same_bytes(numbers_triton.numbers(stream, position), uniform(stream, position))
    for width in (1, 3, 512, 1500):
        logp = torch.log_softmax(torch.randn(24, width, generator=generator) * 3, dim=-1)
        logp[3, : width - 1], logp[4, 1:] = -torch.inf, -torch.inf
        some = slice(7, 7 + len(logp))
        have, want = (way(logp, stream[some], position[some]) for way in (draw_triton.draw, draw))
        assert_same_bytes(have, want, f"{width} ids")  # no threshold lies within an ulp of exp of a boundary
        broken = torch.full_like(logp, torch.nan)
        token, _, finite = draw_triton.draw(broken, stream[some], position[some])
        assert not finite.any() and (token >= 0).all() and (token < width).all()
    assert_notes_as_rows_do(note_triton.note, range(25), here)


if __name__ == "__main__":
    for check in (attention, decoding, columns_and_codes, chains, experts, moves, steps):
        check()
        print(check.__name__)
