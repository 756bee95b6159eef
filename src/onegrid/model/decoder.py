"""One decoder for learner and sampler: Llama, Qwen2, Qwen3 and their mixtures of experts.

It works on rows (tokens of any sequences, in any order) and is told how to attend and what a linear is, so the side
with gradients and the side that makes tokens run this very code. Activations are BF16; inside an operation all is FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onegrid.formats import Quantizer
from onegrid.model.moe import mlp, moe_block
from onegrid.model.spec import ModelSpec
from onegrid.ops.grouped import Dispatch
from onegrid.ops.pins import TILE, round_up
from onegrid.ops.table import PLAIN, Kernels

EMBEDDING = "model.embed_tokens.weight"


class Weights(Protocol):
    """What the decoder asks of the weights of either side."""

    tile: int
    """The rows of an expert start at multiples of it."""

    def tensor(self, name: str) -> Tensor:
        """An unquantized tensor by canonical name, BF16 values in BF16 or FP32."""
        ...

    def embedded(self, tokens_N: Tensor) -> Tensor:
        """Rows of the embedding, BF16 [N, D]."""
        ...

    def linear(
        self, keys: tuple[str, ...], x: Any, dispatch: Dispatch | None = None, *, sent: bool = False
    ) -> list[Tensor]:
        """x [..., M, K] BF16 (or its Operand, where `fuses` said so) through several weights that share it.

        BF16 [..., M, N] each, biases added.

        dispatch  the keys are stacked experts: x [N, K] goes to its places first, results are [P, N]
        sent      x [P, K] lies at its places already
        """
        ...

    def fuses(self, key: str, width: int) -> Quantizer | None:
        """The quantizer of `key`'s activations where the kernel that makes them, `width` wide, is to apply it already.

        None where `linear` quantizes: there is none, no kernel does both, or this side has gradients.
        """
        ...


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_NHD, k_NGD, v_NGD) -> out_NHD, all BF16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Tokens for one forward pass."""

    tokens_N: Tensor
    """int64; padding rows hold any valid id."""
    positions_N: Tensor
    """int64, position of each token in its own sequence."""
    mask_N: Tensor | None
    """bool, False for padding rows; their activations are exactly zero throughout. None: every row is a token."""


def decode_rows(
    spec: ModelSpec,
    weights: Weights,
    rows: Rows,
    attend: Attend,
    *,
    rope: tuple[Tensor, Tensor],
    routes: list[Tensor] | None = None,
    forced_NLK: Tensor | None = None,
    embedded_ND: Tensor | None = None,
    kv_grid: Callable[[Tensor], Tensor] | None = None,
    recompute: bool = False,
    kernels: Kernels = PLAIN,
) -> Tensor:
    """Hidden states after the final norm, BF16 [N, D].

    rope       tables of `rope_table`, long enough for every position
    routes     gets one int16 [N, top_k] tensor a mixture-of-experts layer, appended in layer order: what routers chose
    forced_NLK recorded experts of every such layer to visit instead, -1 where the router decides
    embedded_ND  rows of the embedding, where they were taken before
    kv_grid    rounds keys and values to the grid of a quantized cache, on both sides alike
    recompute  drops each layer's activations and computes them again in the backward pass
    kernels    implementations of what lies between the matmuls; the other side must have the same
    A row's result does not depend on the other rows; their number is padded to a multiple of TILE inside.
    """
    num_rows = rows.tokens_N.shape[0]
    padding = max(TILE, round_up(num_rows, TILE)) - num_rows
    tokens, positions = (_padded(t, padding) for t in (rows.tokens_N, rows.positions_N))
    moe_layers = sorted(spec.moe_layers)
    forced = None if forced_NLK is None else _padded(forced_NLK, padding)
    mask = rows.mask_N
    if padding or mask is not None:
        mask = _padded(torch.ones_like(rows.tokens_N, dtype=torch.bool) if mask is None else mask, padding)
    x = _masked(weights.embedded(tokens) if embedded_ND is None else _padded(embedded_ND, padding), mask)

    def block(layer: int, x_ND: Tensor, y_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        """One layer: the residual after attention, and what the MLP adds to it, from the same two of the layer below.

        The sum is left to the next norm, which reads it anyway.
        """
        at = f"model.layers.{layer}"
        norm = weights.tensor(f"{at}.input_layernorm.weight")
        if y_ND is None:
            h = kernels.norm(x_ND, norm, spec.rms_eps)
        else:
            x_ND, h = _normed(weights, f"{at}.self_attn.q_proj.weight", x_ND, y_ND, norm, spec.rms_eps, kernels)
        q, k, v = _attention_inputs(spec, weights, f"{at}.self_attn", h, rope, positions, kernels)
        if kv_grid is not None:
            k, v = kv_grid(k), kv_grid(v)
        out = attend(layer, q[:num_rows], k[:num_rows], v[:num_rows])
        out = _masked(_padded(out.flatten(1), padding), mask)
        y_ND = _masked(weights.linear((f"{at}.self_attn.o_proj.weight",), out)[0], mask)
        norm = weights.tensor(f"{at}.post_attention_layernorm.weight")
        if layer in spec.moe_layers:
            x_ND, h = kernels.residual_norm(x_ND, y_ND, norm, spec.rms_eps)
            forced_NK = None if forced is None else forced[:, moe_layers.index(layer)]
            return x_ND, moe_block(spec, weights, f"{at}.mlp", h, mask, routes, kernels, forced_NK)
        x_ND, h = _normed(weights, f"{at}.mlp.gate_proj.weight", x_ND, y_ND, norm, spec.rms_eps, kernels)
        return x_ND, mlp(weights, f"{at}.mlp", h, kernels)

    y: Tensor | None = None
    for layer in range(spec.num_layers):
        if recompute and torch.is_grad_enabled():
            x, y = checkpoint(block, layer, x, y, use_reentrant=False)
        else:
            x, y = block(layer, x, y)
    if routes is not None:
        routes[:] = [route_NK[:num_rows] for route_NK in routes]
    assert y is not None
    return kernels.residual_norm(x, y, weights.tensor("model.norm.weight"), spec.rms_eps)[1][:num_rows]


def head_name(spec: ModelSpec) -> str:
    """Canonical name of the tensor that makes logits: the embedding itself when tied."""
    return EMBEDDING if spec.tied else "lm_head.weight"


def _normed(
    weights: Weights, key: str, x_ND: Tensor, y_ND: Tensor, norm_D: Tensor, eps: float, kernels: Kernels
) -> tuple[Tensor, Any]:
    """x + y and its norm, quantized for `key` where that is one kernel."""
    quantizer = weights.fuses(key, x_ND.shape[-1])
    if quantizer is None:
        return kernels.residual_norm(x_ND, y_ND, norm_D, eps)
    return kernels.residual_norm_operand(x_ND, y_ND, norm_D, eps, quantizer)


def _attention_inputs(
    spec: ModelSpec,
    weights: Weights,
    at: str,
    h_ND: Any,
    rope: tuple[Tensor, Tensor],
    positions_N: Tensor,
    kernels: Kernels,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, H, D], k and v [N, G, D]: projections, head norms, rotation."""
    q, k, v = weights.linear(tuple(f"{at}.{name}_proj.weight" for name in "qkv"), h_ND)
    q, k, v = (t.view(len(t), -1, spec.head_dim) for t in (q, k, v))
    norms = [weights.tensor(f"{at}.{name}_norm.weight") if spec.qk_norm else None for name in "qk"]
    q, k = kernels.heads(q, k, norms[0], norms[1], spec.rms_eps, rope, positions_N)
    return q, k, v


def _padded(x: Tensor, padding: int) -> Tensor:
    """`padding` zero rows at the end."""
    return torch.nn.functional.pad(x, (0,) * (2 * x.dim() - 1) + (padding,)) if padding else x


def _masked(x_ND: Tensor, mask_N: Tensor | None) -> Tensor:
    """Zero rows where the mask is False."""
    return x_ND if mask_N is None else x_ND.masked_fill(~mask_N[:, None], 0.0)
