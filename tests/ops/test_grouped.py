"""Experts by grouped matmuls: the bytes of one matmul an expert, whatever the places, and no wait for the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onegrid.formats import QUANTIZERS
from onegrid.ops.grouped import (
    Dispatch,
    Gather,
    Scatter,
    bring_back,
    by_expert,
    dispatch,
    grouped_matmul,
    grouped_wgrad,
    rows_of,
    take,
    triton_bring_back,
    triton_dispatch,
    wgrad_by_expert,
)
from onegrid.ops.operand import Operand, compute_dtype, operand
from onegrid.ops.routing import route as route_by_definition
from onegrid.ops.routing import triton_route
from tests.bytes import assert_same_bytes

PAIRS = [
    (None, None),
    ("mxfp8", "mxfp8"),
    ("nvfp4_row", "nvfp4"),
    ("fp8_row", "fp8_row"),
    ("fp8_1x128_fp32", "fp8_128x128_fp32"),
]
ROUTES = {
    "spread": lambda n, e: (torch.arange(2 * n) * 7 % e).view(n, 2),
    "all to one": lambda n, e: torch.full((n, 2), e - 1).scatter_(1, torch.zeros(n, 1, dtype=torch.int64), 0),
    "one empty": lambda n, e: torch.stack([torch.zeros(n, dtype=torch.int64), 1 + torch.arange(n) % (e - 2)], 1),
}


def draw(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def sent(a: Operand, places: Dispatch) -> Operand:
    row = None if a.row is None else take(a.row, places.source)
    block = None if a.block is None else take(a.block, places.source)
    return Operand(take(a.values, places.source), a.kind, row, block)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("activation", "weight"), PAIRS, ids=str)
@pytest.mark.parametrize(("num_tokens", "experts", "shape"), [(33, 6, (96, 256)), (100, 40, (48, 128))], ids=str)
def test_places_of_experts_have_the_bytes_of_one_matmul_an_expert(
    route, activation, weight, num_tokens, experts, shape, device
):
    n, k = shape
    expert_NK = ROUTES[route](num_tokens, experts).to(device)
    x, w = draw(num_tokens, k, device=device), draw(experts, n, k, device=device, seed=1)
    qa, qw = (None if name is None else QUANTIZERS[name] for name in (activation, weight))
    everyone = torch.ones(num_tokens, dtype=torch.bool, device=device)
    a, b = operand(x, qa), operand(w, qw)
    for tile in (16, 128):
        places = dispatch(expert_NK, everyone, experts, tile=tile)
        assert all(rows.start % tile == rows.stop % tile == 0 for _, rows in places.groups())
        out = Gather.apply(grouped_matmul(sent(a, places), b, places), places)
        assert_same_bytes(out, Gather.apply(by_expert(sent(a, places), b, places), places))
    part = slice(3, 20)
    places = dispatch(expert_NK[part], everyone[part], experts)
    alone = Gather.apply(grouped_matmul(sent(operand(x[part], qa), places), b, places), places)
    assert_same_bytes(alone, out[part])


def test_gradients_of_experts_are_sums_over_their_own_places(device):
    expert_NK = ROUTES["one empty"](70, 7).to(device)
    places = dispatch(expert_NK, torch.ones(70, dtype=torch.bool, device=device), 7)
    dy, x = (
        Scatter.apply(draw(70, width, device=device, seed=width), places).to(compute_dtype(device))
        for width in (40, 56)
    )
    found = grouped_wgrad(dy, x, places)
    assert_same_bytes(grouped_wgrad(dy, x, places), found)
    assert not found[6].any() and found.dtype == torch.float32
    want = torch.stack([dy.double()[expert_rows(places, e)].mT @ x.double()[expert_rows(places, e)] for e in range(7)])
    # At most 70 exact products of size up to 16, summed in FP32.
    assert (found.double() - want).abs().max() <= 70 * 16 * 70 * 2.0**-24
    assert_same_bytes(wgrad_by_expert(dy, x, places)[6], found[6])


def expert_rows(places: Dispatch, expert: int) -> slice:
    return dict(places.groups()).get(expert, slice(0, 0))


def test_a_dispatch_is_captured_and_replayed_with_other_routes(gpu):
    num_tokens, experts, k = 48, 16, 64
    x, w = draw(num_tokens, k, device=gpu), operand(draw(experts, 32, k, device=gpu, seed=1), None)
    route_NK = torch.zeros(num_tokens, 2, dtype=torch.int64, device=gpu)
    everyone = torch.ones(num_tokens, dtype=torch.bool, device=gpu)

    def through() -> Tensor:
        places = dispatch(route_NK, everyone, experts)
        return Gather.apply(grouped_matmul(sent(operand(x, None), places), w, places), places)

    through()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = through()
    for name in ROUTES:
        route_NK.copy_(ROUTES[name](num_tokens, experts))
        graph.replay()
        assert_same_bytes(out.clone(), through(), name)


def test_places_behind_the_last_expert_are_cleared_where_one_number_spans_all(device):
    places = dispatch(ROUTES["spread"](9, 4).to(device), torch.ones(9, dtype=torch.bool, device=device), 4)
    dirty = torch.full((len(places.source), 8), torch.nan, device=device)
    clean = places.cleared(dirty)
    assert int(clean.isnan().any(1).sum()) == 18 and not clean[places.source == 9].any()


@pytest.mark.parametrize(("experts", "top_k", "tile"), [(1, 1, 16), (6, 2, 16), (60, 4, 128), (128, 8, 16)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 16, 77, 256])
def test_routes_places_and_results_of_few_tokens_have_the_bytes_of_their_definitions(
    experts, top_k, tile, num_tokens, gpu
):
    x, router = draw(num_tokens, 64, device=gpu), draw(experts, 64, device=gpu, seed=1).float()
    router[experts // 2 :] = router[: experts - experts // 2].clone()  # ties
    x[num_tokens // 2, 0] = torch.nan
    with torch.no_grad():
        for normalize in (False, True):
            have = triton_route(x, router, top_k=top_k, normalize=normalize)
            want = route_by_definition(x, router, top_k=top_k, normalize=normalize)
            assert_same_bytes([have[0], have[2]], [want[0], want[2]])
            assert_same_bytes(have[1].nan_to_num(-1.0), want[1].nan_to_num(-1.0))
        expert_NK, weight_NK, _ = have
        weight_NK = weight_NK.nan_to_num(0.5)
        for mask in (None, x[:, 1] > 0, x[:, 1] > 100):
            places, want = (way(expert_NK, mask, experts, tile=tile) for way in (triton_dispatch, dispatch))
            for name in ("place_NK", "source", "pair", "end_E"):
                assert_same_bytes(getattr(places, name), getattr(want, name), name)
            y = draw(len(places.pair), 1300, device=gpu, seed=2)
            for held, index in ((x, places.source), (y[:, :7], places.place_NK), (weight_NK, places.source)):
                assert_same_bytes(take(held, index), rows_of(held, index))
                fp8 = held.contiguous().view(torch.float8_e4m3fn)
                assert_same_bytes(take(fp8, index), rows_of(fp8.view(torch.uint8), index).view(fp8.dtype))
            for extra in (None, draw(num_tokens, 1300, device=gpu, seed=3).float()):
                ways = (way(y, places, weight_NK, extra) for way in (triton_bring_back, bring_back))
                assert_same_bytes(*ways)


def test_results_come_back_with_the_shared_part_and_are_rounded_once(device):
    expert_NK = torch.tensor([[1, 0], [2, 1], [0, 2]], device=device)
    places = dispatch(expert_NK, torch.tensor([True, True, False], device=device), 3, tile=4)
    y, weight = draw(len(places.pair), 5, device=device), torch.rand(3, 2, device=device)
    extra = torch.randn(3, 5, device=device)
    have = bring_back(y, places, weight, extra)
    for row in (0, 1):
        one, two = (y[places.place_NK[row, slot]].float() * weight[row, slot] for slot in (0, 1))
        assert_same_bytes(have[row], ((one + two) + extra[row]).bfloat16())
    assert_same_bytes(have[2], extra[2].bfloat16())
    assert_same_bytes(bring_back(y, places, weight)[2], torch.zeros(5, dtype=torch.bfloat16, device=device))
