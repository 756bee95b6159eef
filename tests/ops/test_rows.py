"""A row's bytes do not depend on the rows around it: every operation that both sides call."""

from __future__ import annotations

import pytest
import torch

from onegrid.formats import QUANTIZERS
from onegrid.ops.activation import sigmoid, swiglu
from onegrid.ops.attention import attention
from onegrid.ops.grouped import Gather, Scatter, combine, dispatch, grouped_matmul
from onegrid.ops.linear import matmul
from onegrid.ops.logprob import log_probs, logits, token_logp
from onegrid.ops.norm import rms_norm
from onegrid.ops.operand import operand, operand_of
from onegrid.ops.routing import route
from tests.bytes import assert_same_bytes

PER_TOKEN = [name for name, q in QUANTIZERS.items() if q.is_per_token and q.source.startswith("Transformer")]
NUM_ROWS = 150
SUBSETS = [slice(0, 1), slice(3, 4), slice(149, 150), slice(0, 2), slice(7, 24), slice(40, 73), slice(5, 150)]


def rows(num: int, width: int, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, width, generator=generator).to(device, torch.bfloat16)


@pytest.mark.parametrize("name", [None, *PER_TOKEN], ids=str)
@pytest.mark.parametrize(("width", "out"), [(32, 64), (96, 50), (256, 130)])
def test_a_grid_matmul_row_depends_on_that_row_only(name, width, out, device):
    quantizer = None if name is None else QUANTIZERS[name]
    x, w = rows(NUM_ROWS, width, device), operand(rows(out, width, device, 1), quantizer)
    whole = matmul(operand(x, quantizer), w)
    for part in SUBSETS:
        assert_same_bytes(matmul(operand(x[part], quantizer), w), whole[part])


@pytest.mark.parametrize("name", [n for n in QUANTIZERS if QUANTIZERS[n].source.startswith("Transformer")])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(33, 48), (3, 20, 130)])
def test_an_operand_from_codes_equals_the_operand_from_numbers(name, axis, shape, device):
    from onegrid.formats import quantize

    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    fast = operand(x, QUANTIZERS[name], axis=axis)
    slow = operand_of(quantize(x, QUANTIZERS[name], axis=axis))
    assert fast.kind == slow.kind
    for have, want in ((fast.values, slow.values), (fast.row, slow.row), (fast.block, slow.block)):
        if want is None:
            assert have is None
        else:
            assert_same_bytes(have.contiguous(), want.contiguous())


@pytest.mark.parametrize("op", ["norm", "swiglu", "sigmoid", "route", "logits", "log_probs", "token_logp"])
def test_a_row_of_other_operations_depends_on_that_row_only(op, device):
    x, w = rows(NUM_ROWS, 96, device), rows(1, 96, device, 1)[0]
    router, head = rows(8, 96, device, 3), rows(211, 96, device, 4)
    tokens = torch.arange(NUM_ROWS, device=device)
    functions = {
        "norm": lambda s: rms_norm(x[s], w, 1e-6),
        "swiglu": lambda s: swiglu(x[s], x[s].flip(-1)),
        "sigmoid": lambda s: sigmoid(x[s].float()),
        "route": lambda s: route(x[s], router, top_k=3, normalize=True)[1],
        "logits": lambda s: logits(x[s], head),
        "log_probs": lambda s: log_probs(logits(x[s], head), 0.7),
        "token_logp": lambda s: token_logp(x[s], head, tokens[s], temperature=0.7)[0],
    }
    whole = functions[op](slice(None))
    for part in SUBSETS:
        assert_same_bytes(functions[op](part), whole[part])


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (4, 4, 32), (8, 1, 16)])
def test_decode_equals_prefill_whatever_stands_beside_it(heads, groups, width, device):
    generator = torch.Generator().manual_seed(5)
    num_batch, length = 3, 70

    def draw(count: int) -> torch.Tensor:
        return torch.randn(num_batch, length, count, width, generator=generator).to(device, torch.bfloat16)

    q, k, v = draw(heads), draw(groups), draw(groups)
    whole = attention(q, k, v, torch.zeros(num_batch, dtype=torch.int64, device=device))
    for position in (0, 1, 31, 32, 33, 64, 69):
        one = slice(position, position + 1)
        start = torch.full((num_batch,), position, device=device)
        assert_same_bytes(attention(q[:, one], k, v, start), whole[:, one])
        assert_same_bytes(attention(q[:, one], k[:, : position + 1], v[:, : position + 1], start), whole[:, one])
        assert_same_bytes(attention(q[1:2, one], k[1:2], v[1:2], start[1:2]), whole[1:2, one])
        junk_k, junk_v = k.clone(), v.clone()
        junk_k[:, position + 1 :], junk_v[:, position + 1 :] = 1e30, -1e30
        assert_same_bytes(attention(q[:, one], junk_k, junk_v, start), whole[:, one])
    second = attention(q[:, 40:], k, v, torch.full((num_batch,), 40, device=device))
    assert_same_bytes(second, whole[:, 40:])


def test_attention_agrees_with_a_float64_softmax(device):
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, 50, n, 16, generator=generator).to(device, torch.bfloat16) for n in (4, 2, 2))
    out = attention(q, k, v, torch.zeros(2, dtype=torch.int64, device=device))
    q64, k64, v64 = (t.double().transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    want = torch.nn.functional.scaled_dot_product_attention(q64, k64, v64, is_causal=True).transpose(1, 2)
    # FP32 sums of 50 terms are far below the one rounding to BF16 at the end, half an ulp of at most 2^-8 relative.
    assert torch.allclose(out.double(), want, rtol=2**-8, atol=1e-5)


def test_a_row_sent_to_experts_comes_back_the_same_in_any_company(device):
    x, w = rows(NUM_ROWS, 64, device), rows(6 * 32, 64, device, 1).view(6, 32, 64)
    expert = torch.randint(0, 5, (NUM_ROWS, 2), generator=torch.Generator().manual_seed(7)).to(device)  # 5 stays empty
    weight = rows(NUM_ROWS, 2, device, 8).float()
    quantizer = QUANTIZERS["mxfp8"]
    stacked = operand(w, quantizer)

    def through(part: slice) -> torch.Tensor:
        mask = torch.ones(len(x[part]), dtype=torch.bool, device=device)
        places = dispatch(expert[part], mask, 6)
        out = grouped_matmul(operand(Scatter.apply(x[part], places), quantizer), stacked, places)
        return combine(Gather.apply(out, places), weight[part])

    whole = through(slice(None))
    for part in SUBSETS:
        assert_same_bytes(through(part), whole[part])
    flat = operand(w.reshape(-1, 64), quantizer)
    dense = matmul(operand(x, quantizer), flat).view(NUM_ROWS, 6, 32)
    pick = torch.stack([dense[torch.arange(NUM_ROWS), expert[:, slot]] for slot in range(2)], 1)
    assert_same_bytes(combine(pick, weight), whole)


def test_no_token_and_only_padding_rows_are_valid_inputs(device):
    empty = rows(0, 64, device)
    w = operand(rows(32, 64, device), QUANTIZERS["mxfp8"])
    assert matmul(operand(empty, QUANTIZERS["mxfp8"]), w).shape == (0, 32)
    mask = torch.zeros(4, dtype=torch.bool, device=device)
    places = dispatch(torch.zeros(4, 2, dtype=torch.int64, device=device), mask, 3)
    out = Scatter.apply(rows(4, 64, device), places)
    assert not out.any() and (device.type == "cuda" or out.shape == (0, 64))
    assert not Gather.apply(out, places).any()
    weights = operand(rows(3 * 32, 64, device).view(3, 32, 64), None)
    assert grouped_matmul(operand(out, None), weights, places).shape == (len(out), 32)


def test_top_k_gives_ties_to_the_lower_index(device):
    x = torch.ones(4, 8, dtype=torch.bfloat16, device=device)
    router = torch.zeros(6, 8, device=device)
    router[4] = 1.0
    expert, weight, _ = route(x, router, top_k=3, normalize=True)
    assert expert.tolist() == [[4, 0, 1]] * 4
    assert torch.allclose(weight.sum(-1), torch.ones(4, device=device))


@pytest.mark.parametrize("length", [1, 20, 75])
def test_attention_gradients_equal_float64_autograd(length, device):
    generator = torch.Generator().manual_seed(9)
    leaves = [
        torch.randn(2, length, n, 16, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for n in (4, 2, 2)
    ]
    dout = torch.randn(2, length, 4, 16, generator=generator).to(device, torch.bfloat16)
    attention(*leaves, torch.zeros(2, dtype=torch.int64, device=device)).backward(dout)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    q, k, v = (t.transpose(1, 2) for t in (wide[0], *(t.repeat_interleave(2, 2) for t in wide[1:])))
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).backward(dout.double())
    for have, want in zip(leaves, wide, strict=True):
        # one rounding to BF16 at the end, half an ulp: 2^-9 relative, and FP32 sums far below it
        assert torch.allclose(have.grad.double(), want.grad, rtol=2**-8, atol=2e-5)


@pytest.mark.parametrize("op", ["swiglu", "norm"])
def test_gradients_of_chains_equal_float64_autograd(op, device):
    x, y = rows(40, 48, device, 1), rows(40, 48, device, 2)
    dy = rows(40, 48, device, 3)
    leaves = [x.clone().requires_grad_(), (y if op == "swiglu" else y[0].float()).clone().requires_grad_()]
    (swiglu(*leaves) if op == "swiglu" else rms_norm(*leaves, 1e-6)).backward(dy)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    if op == "swiglu":
        want = torch.nn.functional.silu(wide[0]) * wide[1]
    else:
        want = torch.nn.functional.rms_norm(wide[0], (48,), wide[1], 1e-6)
    want.backward(dy.double())
    for have, reference in zip(leaves, wide, strict=True):
        assert torch.allclose(have.grad.double(), reference.grad, rtol=2**-8, atol=1e-4)  # one rounding to BF16
