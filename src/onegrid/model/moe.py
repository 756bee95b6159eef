"""The dense MLP and the mixture of experts: route, send, compute, bring back, add in slot order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onegrid.model.spec import ModelSpec
from onegrid.ops.activation import sigmoid
from onegrid.ops.routing import NarrowLinear
from onegrid.ops.table import PLAIN, Kernels

if TYPE_CHECKING:
    from onegrid.model.decoder import Weights


def moe_block(
    spec: ModelSpec,
    weights: Weights,
    at: str,
    h_ND: Tensor,
    mask_N: Tensor | None,
    routes: list[Tensor] | None,
    kernels: Kernels = PLAIN,
    forced_NK: Tensor | None = None,
) -> Tensor:
    """Routed experts plus, where the family has one, a gated shared expert; FP32 sum, one rounding to BF16.

    h_ND    BF16, a multiple of TILE rows; masked rows (mask_N False; None: no row) are zero and visit no expert
    routes  gets the experts that the router chooses here, int16 [N, top_k]
    forced_NK  experts to visit instead, -1 where the router decides
    """
    expert_NK, weight_NK, found_NK = kernels.route(
        h_ND,
        weights.tensor(f"{at}.gate.weight"),
        top_k=spec.top_k,
        normalize=spec.norm_topk_prob,
        forced_NK=forced_NK,
    )
    if routes is not None:
        routes.append(found_NK.to(torch.int16))
    places = kernels.dispatch(expert_NK, mask_N, spec.num_experts, tile=weights.tile)
    experts = f"{at}.experts"
    gate, up = weights.linear((f"{experts}.gate_proj.weight", f"{experts}.up_proj.weight"), h_ND, places)
    out = weights.linear((f"{experts}.down_proj.weight",), kernels.swiglu(gate, up), places, sent=True)[0]
    shared_ND = shared_expert(weights, at, h_ND, kernels) if spec.shared_expert_intermediate_size else None
    return kernels.bring_back(out, places, weight_NK, shared_ND)


def mlp(weights: Weights, at: str, h_ND: Any, kernels: Kernels = PLAIN) -> Tensor:
    """down(silu(gate h) * up h), BF16. h BF16 [N, D] or its operand."""
    gate, up = weights.linear((f"{at}.gate_proj.weight", f"{at}.up_proj.weight"), h_ND)
    down = f"{at}.down_proj.weight"
    quantizer = weights.fuses(down, gate.shape[-1])
    inner = kernels.swiglu(gate, up) if quantizer is None else kernels.swiglu_operand(gate, up, quantizer)
    return weights.linear((down,), inner)[0]


def shared_expert(weights: Weights, at: str, h_ND: Tensor, kernels: Kernels = PLAIN) -> Tensor:
    """sigmoid(gate h) times the shared MLP's output, FP32 [N, D]. Qwen2-MoE."""
    logit = NarrowLinear.apply(h_ND, weights.tensor(f"{at}.shared_expert_gate.weight"))
    return sigmoid(logit) * mlp(weights, f"{at}.shared_expert", h_ND, kernels).float()
