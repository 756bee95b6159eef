"""Log-probabilities, FP32, at the sampling temperature: one definition for the two sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onegrid.ops.linear import dot
from onegrid.ops.operand import compute_dtype
from onegrid.ops.pins import TILE, pad_rows

CHUNK_ELEMENTS = 1 << 24
"""Most logits that exist at once: rows of a chunk times vocabulary."""


def logits(hidden_ND: Tensor, head_VD: Tensor) -> Tensor:
    """FP32 [N, V], the sums themselves, not rounded to BF16. hidden BF16, head FP32 or BF16 holding BF16 values."""
    dtype = compute_dtype(hidden_ND.device)
    return dot(pad_rows(hidden_ND.to(dtype)), head_VD.to(dtype))[: hidden_ND.shape[0]]


def log_probs(logits_NV: Tensor, temperature: float, keep_NV: Tensor | None = None) -> Tensor:
    """Log-softmax of logits / temperature over the vocabulary, FP32 [N, V].

    keep_NV  bool: tokens outside get -Inf and the rest is renormalized (top-p and top-k)
    temperature 0 means the greedy choice, whose log-probability is reported at temperature 1.
    """
    scaled = logits_NV if temperature in (0.0, 1.0) else logits_NV / temperature
    if keep_NV is not None:
        scaled = scaled.masked_fill(~keep_NV, -torch.inf)
    return torch.log_softmax(pad_rows(scaled), dim=-1)[: scaled.shape[0]]


class TokenLogProb(torch.autograd.Function):
    """Log-probability of chosen tokens and entropy per row, in chunks; the backward pass computes logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        master_VD: Tensor,
        head_VD: Tensor,
        tokens_N: Tensor,
        temperature: float,
        keep: Any,
    ) -> tuple[Tensor, Tensor]:
        """Shapes and meaning: `token_logp`."""
        head_VD = head_VD.detach().to(compute_dtype(hidden_ND.device))
        ctx.save_for_backward(hidden_ND, head_VD, tokens_N)
        ctx.temperature, ctx.keep, ctx.dtype = temperature, keep, master_VD.dtype
        ctx.set_materialize_grads(False)
        logp, entropy = [], []
        for rows in _chunks(hidden_ND, head_VD):
            logp_NV = log_probs(logits(hidden_ND[rows], head_VD), temperature, _keep(keep, rows, head_VD))
            logp.append(logp_NV.gather(1, tokens_N[rows, None])[:, 0])
            entropy.append(_entropy(logp_NV))
        if not logp:
            empty = hidden_ND.new_zeros(0, dtype=torch.float32)
            return empty, empty.clone()
        return torch.cat(logp), torch.cat(entropy)

    @staticmethod
    def backward(ctx: Any, dlogp_N: Tensor | None, dentropy_N: Tensor | None) -> tuple[Any, ...]:
        """d logp / d logit = (1[v = token] - p_v) / T; d entropy / d logit = -p_v (log p_v + entropy) / T.

        Their two products with head and hidden states are FP32 sums over the compute dtype: on a GPU the gradients of
        logits are rounded to BF16 for them.
        """
        hidden_ND, head_VD, tokens_N = ctx.saved_tensors
        if dlogp_N is None:
            dlogp_N = hidden_ND.new_zeros(len(hidden_ND), dtype=torch.float32)
        temperature, dtype = ctx.temperature or 1.0, head_VD.dtype
        dhidden = torch.zeros_like(hidden_ND)
        trained = ctx.needs_input_grad[1]
        dhead = torch.zeros(head_VD.shape, dtype=torch.float32, device=head_VD.device) if trained else None
        for rows in _chunks(hidden_ND, head_VD):
            hidden = hidden_ND[rows]
            logp_NV = log_probs(logits(hidden, head_VD), ctx.temperature, _keep(ctx.keep, rows, head_VD))
            p = logp_NV.exp()
            dlogits = p * -dlogp_N[rows, None]
            dlogits.scatter_add_(1, tokens_N[rows, None], dlogp_N[rows, None].float())
            if dentropy_N is not None:
                inner = torch.where(p > 0, logp_NV, 0.0) + _entropy(logp_NV)[:, None]
                dlogits -= dentropy_N[rows, None] * p * inner
            dlogits = (dlogits / temperature).to(dtype)
            dhidden[rows] = dot(dlogits, head_VD.mT).to(hidden.dtype)
            if dhead is not None:
                dhead += dot(dlogits.mT, hidden.to(dtype).mT)
        return dhidden, None if dhead is None else dhead.to(ctx.dtype), None, None, None, None


def token_logp(
    hidden_ND: Tensor,
    head_VD: Tensor,
    tokens_N: Tensor,
    *,
    temperature: float,
    kept: list[Tensor] | None = None,
    master_VD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `tokens_N` and entropy of each row's distribution, both FP32 [N] in nats, differentiable.

    hidden_ND  BF16, after the final norm; head_VD FP32 or BF16 holding BF16 values; tokens_N int64
    master_VD  FP32, what the head's gradient goes to; None: `head_VD` itself
    kept       per row the ids of the kept set where the sampler truncated (an empty tensor keeps all)
    Vocabulary times tokens never exists at once: a chunk has at most CHUNK_ELEMENTS logits, or a quarter of the head's
    own elements, since its gradient takes that room anyway.
    """
    master = head_VD if master_VD is None else master_VD
    return TokenLogProb.apply(hidden_ND, master, head_VD, tokens_N, temperature, kept)


def rows_at_once(vocabulary: int, width: int) -> int:
    """Rows of a chunk, see `token_logp`."""
    return max(TILE, CHUNK_ELEMENTS // vocabulary // TILE * TILE, width // 4 // TILE * TILE)


def _chunks(hidden_ND: Tensor, head_VD: Tensor) -> list[slice]:
    rows = rows_at_once(*head_VD.shape)
    return [slice(start, min(start + rows, len(hidden_ND))) for start in range(0, len(hidden_ND), rows)]


def _keep(kept: list[Tensor] | None, rows: slice, head_VD: Tensor) -> Tensor | None:
    if kept is None:
        return None
    part = kept[rows]
    keep_NV = torch.zeros(len(part), head_VD.shape[0], dtype=torch.bool, device=head_VD.device)
    for row, ids in enumerate(part):
        keep_NV[row, ids if len(ids) else slice(None)] = True
    return keep_NV


def _entropy(logp_NV: Tensor) -> Tensor:
    """-sum p log p with 0 log 0 = 0."""
    return -(logp_NV.exp() * torch.where(logp_NV > -torch.inf, logp_NV, 0.0)).sum(-1)
