"""One decoder for learner and sampler: Llama, Qwen2, Qwen3 and their mixtures of experts.

It works on rows (tokens of any sequences, in any order) and is told how to attend and what a linear is, so the side
with gradients and the side that makes tokens run this very code. Activations are BF16; inside an operation all is FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onegrid.model.moe import mlp, moe_block
from onegrid.model.spec import ModelSpec
from onegrid.ops.grouped import Dispatch
from onegrid.ops.norm import rms_norm
from onegrid.ops.pins import TILE, round_up
from onegrid.ops.rotary import rotate


class Weights(Protocol):
    """What the decoder asks of the weights of either side."""

    def tensor(self, name: str) -> Tensor:
        """An unquantized tensor by canonical name, BF16 values in BF16 or FP32."""
        ...

    def linear(self, keys: tuple[str, ...], x: Tensor, dispatch: Dispatch | None = None) -> list[Tensor]:
        """x [..., M, K] BF16 through several weights that share it: BF16 [..., M, N] each, biases added.

        dispatch  x is [N, K] and goes to stacked experts first: results are [E, capacity, N].
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
    mask_N: Tensor
    """bool, False for padding rows; their activations are exactly zero throughout."""


def decode_rows(
    spec: ModelSpec,
    weights: Weights,
    rows: Rows,
    attend: Attend,
    *,
    rope: tuple[Tensor, Tensor],
    routes: list[Tensor] | None = None,
    kv_grid: Callable[[Tensor], Tensor] | None = None,
    recompute: bool = False,
) -> Tensor:
    """Hidden states after the final norm, BF16 [N, D].

    rope       tables of `rope_table`, long enough for every position
    routes     gets one int16 [N, top_k] tensor a mixture-of-experts layer, appended in layer order
    kv_grid    rounds keys and values to the grid of a quantized cache, on both sides alike
    recompute  drops each layer's activations and computes them again in the backward pass
    A row's result does not depend on the other rows; their number is padded to a multiple of TILE inside.
    """
    num_rows = rows.tokens_N.shape[0]
    padding = max(TILE, round_up(num_rows, TILE)) - num_rows
    tokens, positions, mask = (
        torch.nn.functional.pad(t, (0, padding)) for t in (rows.tokens_N, rows.positions_N, rows.mask_N)
    )
    cos_ND, sin_ND = rope[0][positions], rope[1][positions]
    x = torch.nn.functional.embedding(tokens, weights.tensor("model.embed_tokens.weight")).to(torch.bfloat16)
    x = x.masked_fill(~mask[:, None], 0.0)

    def block(layer: int, x_ND: Tensor) -> Tensor:
        """One layer, attention and MLP, with their residuals."""
        at = f"model.layers.{layer}"
        h = rms_norm(x_ND, weights.tensor(f"{at}.input_layernorm.weight"), spec.rms_eps)
        q, k, v = _attention_inputs(spec, weights, f"{at}.self_attn", h, cos_ND, sin_ND)
        if kv_grid is not None:
            k, v = kv_grid(k), kv_grid(v)
        out = attend(layer, q[:num_rows], k[:num_rows], v[:num_rows])
        out = torch.nn.functional.pad(out.flatten(1), (0, 0, 0, padding)).masked_fill(~mask[:, None], 0.0)
        x_ND = x_ND + weights.linear((f"{at}.self_attn.o_proj.weight",), out)[0].masked_fill(~mask[:, None], 0.0)
        h = rms_norm(x_ND, weights.tensor(f"{at}.post_attention_layernorm.weight"), spec.rms_eps)
        if layer in spec.moe_layers:
            return x_ND + moe_block(spec, weights, f"{at}.mlp", h, mask, routes)
        return x_ND + mlp(weights, f"{at}.mlp", h)

    for layer in range(spec.num_layers):
        if recompute and torch.is_grad_enabled():
            x = checkpoint(block, layer, x, use_reentrant=False)
        else:
            x = block(layer, x)
    if routes is not None:
        routes[:] = [route_NK[:num_rows] for route_NK in routes]
    return rms_norm(x, weights.tensor("model.norm.weight"), spec.rms_eps)[:num_rows]


def head_name(spec: ModelSpec) -> str:
    """Canonical name of the tensor that makes logits: the embedding itself when tied."""
    return "model.embed_tokens.weight" if spec.tied else "lm_head.weight"


def _attention_inputs(
    spec: ModelSpec, weights: Weights, at: str, h_ND: Tensor, cos_ND: Tensor, sin_ND: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, H, D], k and v [N, G, D]: projections, head norms, rotation."""
    q, k, v = weights.linear(tuple(f"{at}.{name}_proj.weight" for name in "qkv"), h_ND)
    q, k, v = (t.view(len(t), -1, spec.head_dim) for t in (q, k, v))
    if spec.qk_norm:
        q = rms_norm(q, weights.tensor(f"{at}.q_norm.weight"), spec.rms_eps)
        k = rms_norm(k, weights.tensor(f"{at}.k_norm.weight"), spec.rms_eps)
    return rotate(q, cos_ND, sin_ND), rotate(k, cos_ND, sin_ND), v
