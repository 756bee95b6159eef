"""Whole prompts through the decoder: what a completion starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from itertools import accumulate

import torch
from torch import Tensor

from onegrid.model.decoder import Attend, Rows, decode_rows, head_name
from onegrid.model.kv import kv_grid
from onegrid.model.live import LiveWeights
from onegrid.model.taps import Tapped, Taps
from onegrid.ops.draw import uniform
from onegrid.ops.logprob import logits
from onegrid.ops.packed_attention import segments_of
from onegrid.sampler.cache import PrefillAttend, Prefilled
from onegrid.sampler.draw import inverse_cdf


@dataclass(frozen=True, slots=True)
class Model:
    """What the steps need of the engine."""

    weights: LiveWeights
    rope: tuple[Tensor, Tensor]
    version: int
    prefill_tokens: int

    def hidden(self, rows: Rows, attend: Attend, routes: list[Tensor] | None) -> Tensor:
        """BF16 [N, D] of the decoder on the plan's key/value grid."""
        grid = kv_grid(self.weights.plan.kv_cache)
        if isinstance(self.weights, Tapped):
            attend = self.weights.attend(attend)
        return decode_rows(
            self.weights.spec,
            self.weights,
            rows,
            attend,
            rope=self.rope,
            routes=routes,
            kv_grid=grid,
            kernels=self.weights.kernels,
        )

    def draw(self, logp_NV: Tensor, stream_N: Tensor, position_N: Tensor) -> Tensor:
        """Tokens, int64 [N], from FP32 log-probabilities and where their uniform numbers come from, int64."""
        if self.weights.device.type != "cuda":
            return inverse_cdf(logp_NV, uniform(stream_N, position_N))
        return self.weights.kernels.draw(logp_NV, stream_N, position_N)[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """FP32 [N, V]."""
        return logits(hidden_ND, self.weights.tensor(head_name(self.weights.spec)))


def prefill(model: Model, prompts: Sequence[tuple[int, ...]], *, record_routing: bool) -> Prefilled:
    """Runs whole prompts, none empty. Their tokens are packed as rows, so padding costs only in attention."""
    device = model.weights.device
    lengths = [len(prompt) for prompt in prompts]
    token_N = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    firsts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    segments = segments_of(firsts, lengths, len(token_N), device)
    end_B = segments.first_B + segments.length_B
    column_N = segments.rectangle.place_NK[:, 0] % segments.longest
    attend = PrefillAttend(segments, model.weights.kernels)
    routes: list[Tensor] | None = [] if record_routing else None
    rows = Rows(tokens_N=token_N, positions_N=column_N, mask_N=None)
    hidden_ND = model.hidden(rows, attend, routes)
    routing = torch.stack(routes, dim=1)[end_B - 1] if routes else None
    return Prefilled(attend.keys, attend.values, hidden_ND[end_B - 1], routing)


def trace(model: Model, prompts: Sequence[tuple[int, ...]]) -> Taps:
    """What linears and attention give for whole prompts, packed in one pass, in forward order."""
    tapped = Tapped(model.weights)
    prefill(with_fields(model, weights=tapped), prompts, record_routing=False)  # type: ignore[arg-type]
    return tapped.taps


def chunks(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Prompts in order, in runs of at most max_tokens tokens; a longer prompt is a run of its own."""
    run: list[tuple[int, ...]] = []
    size = 0
    for prompt in prompts:
        if run and size + len(prompt) > max_tokens:
            yield run
            run, size = [], 0
        run.append(prompt)
        size += len(prompt)
    if run:
        yield run
