"""Decode steps as CUDA graphs: one per number of rows and Sampling, over slots whose addresses never change.

A step draws a token for every row from its hidden state, notes it with its log-probability, decides who has ended, and
runs the token through the decoder. Rows that have ended, or that nobody owns, go along and change nothing. Weights are
read where they lie, so an update in place leaves every graph valid.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from onegrid.model.decoder import Rows
from onegrid.model.live import spans_rows
from onegrid.ops.capture import capturing, early_launches
from onegrid.ops.logprob import log_probs
from onegrid.ops.note import ENDED, FINITE
from onegrid.ops.pins import TILE, round_up
from onegrid.sampler.cache import Cache, DecodeAttend
from onegrid.sampler.prefill import Model
from onegrid.sampler.serving import Addresses, read_addresses
from onegrid.types import Sampling

LOGITS = 1 << 26
"""Most logits of one matmul: the head's weights are read anew for every further one."""

MOST = 256
"""Captured steps that are kept: a few Samplings in all their buckets. A server is asked for any temperature."""


@dataclass(slots=True)
class State:
    """What a step reads and writes, by slot."""

    hidden_SD: Tensor
    """BF16: of the last position of each slot."""
    tokens_SR: Tensor
    """int64: the response so far."""
    logp_SR: Tensor
    """FP32"""
    length_S: Tensor
    """int64: tokens of the response so far."""
    prompt_S: Tensor
    """int64: tokens of the prompt, at least 1."""
    limit_S: Tensor
    """int64: most tokens of the response."""
    stream_S: Tensor
    """int64, see `draw.streams`."""
    forced_S: Tensor
    """int64: token to take instead of a drawn one, for probes; -1 draws."""
    report_4S: Tensor
    """int64, rows of `ops.note`: ended, stopped by a token, every logit so far finite, length; for the host."""
    routing_SRLK: Tensor | None = None
    """int16: experts of the position whose output draws token r, where a Sampling has asked for them."""

    @staticmethod
    def empty(num_slots: int, max_len: int, hidden_size: int, device: torch.device) -> State:
        """Slots that nobody owns: all ended."""

        def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((num_slots, *shape), value, dtype=dtype, device=device)

        report_4S = torch.zeros(4, num_slots, dtype=torch.int64, device=device)
        report_4S[ENDED], report_4S[FINITE] = 1, 1
        return State(
            full(hidden_size, dtype=torch.bfloat16),
            full(max_len),
            full(max_len, dtype=torch.float32),
            full(),
            full(value=1),
            full(value=1),
            full(),
            full(value=-1),
            report_4S,
        )

    def move(self, source_M: Tensor, target_M: Tensor) -> None:
        """Rows of slots `source_M` to slots `target_M`; nobody owns the source any more."""
        per_slot = (self.hidden_SD, self.tokens_SR, self.logp_SR, self.length_S, self.prompt_S, self.limit_S)
        for x in (*per_slot, self.stream_S, self.forced_S):
            x[target_M] = x[source_M]
        if self.routing_SRLK is not None:
            self.routing_SRLK[target_M] = self.routing_SRLK[source_M]
        self.report_4S[:, target_M] = self.report_4S[:, source_M]
        self.report_4S[ENDED, source_M] = 1


def bucket(num_rows: int, num_slots: int) -> int:
    """Rows of the graph that runs `num_rows`: steps of an eighth, multiples of TILE, at most `num_slots`."""
    step = max(TILE, 1 << max(0, num_rows - 1).bit_length() >> 3)
    return min(round_up(max(1, num_rows), step), num_slots)


class Graphs:
    """Captured steps over one state and one cache.

    The cache must have as many slots as the state, a multiple of TILE.
    """

    def __init__(self, cache: Cache, *, max_len: int, hidden_size: int, device: torch.device) -> None:
        self.cache = cache
        self.num_slots = cache.keys[0].shape[0]
        self.max_len, self.hidden_size, self.device = max_len, hidden_size, device
        self.state = State.empty(self.num_slots, max_len, hidden_size, device)
        self.graphs: OrderedDict[tuple[int, float, tuple[int, ...], bool], torch.cuda.CUDAGraph] = OrderedDict()
        """The one that ran last comes last."""
        self.stops: dict[tuple[int, ...], Tensor] = {}  # graphs read them where they lie
        self.reads: Addresses = {}
        """Where the weights lay that the last captured step reads."""
        self.pool = torch.cuda.graph_pool_handle()

    def replay(self, model: Model, num_rows: int, sampling: Sampling) -> None:
        """One step of the first `num_rows` slots, captured before its first run."""
        rows = bucket(num_rows, self.num_slots)
        key = (rows, sampling.temperature, sampling.stop_token_ids, sampling.record_routing)
        if key not in self.graphs:
            if len(self.graphs) >= MOST:
                self._drop_oldest()
            self.graphs[key] = self._capture(model, rows, sampling)
        self.graphs.move_to_end(key)
        self.graphs[key].replay()

    def _drop_oldest(self) -> None:
        """Makes room for one more: without what ran longest ago, and the stop tokens that nobody reads any more."""
        torch.cuda.synchronize(self.device)  # it may still be running
        self.graphs.popitem(last=False)
        read = {ids for _, _, ids, _ in self.graphs}
        self.stops = {ids: held for ids, held in self.stops.items() if ids in read}

    def record_routing(self, num_layers: int, top_k: int) -> Tensor:
        """Room for the experts of every token, made when first asked for: int16 [S, R, L, K]."""
        if self.state.routing_SRLK is None:
            shape = (self.num_slots, self.max_len, num_layers, top_k)
            self.state.routing_SRLK = torch.zeros(shape, dtype=torch.int16, device=self.device)
        return self.state.routing_SRLK

    def reset(self) -> None:
        """Drops every captured step, as after one that failed; the next run captures anew."""
        self.graphs.clear()
        self.stops.clear()
        self.reads = {}
        self.pool = torch.cuda.graph_pool_handle()

    def _capture(self, model: Model, rows: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        ids = sampling.stop_token_ids
        stop_K = self.stops.setdefault(ids, torch.tensor(ids, dtype=torch.int64, device=self.device))
        # Compilers and libraries prepare themselves at the first run, which must not touch what is live.
        scratch = State.empty(rows, self.max_len, self.hidden_size, self.device)
        twin = Cache.twin(self.cache, rows)
        record = sampling.record_routing
        if record:
            assert self.state.routing_SRLK is not None
            scratch.routing_SRLK = torch.zeros_like(self.state.routing_SRLK[:rows])
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), early_launches():
            for _ in range(2):
                step(model, twin, scratch, rows, sampling.temperature, stop_K, record)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, pool=self.pool), early_launches():
                step(model, self.cache, self.state, rows, sampling.temperature, stop_K, record)
        except BaseException:
            self.reset()  # a pool whose capture broke off takes no other
            raise
        self.reads = read_addresses(model.weights)
        return graph


def step(
    model: Model,
    cache: Cache,
    state: State,
    num_rows: int,
    temperature: float,
    stop_K: Tensor,
    record_routing: bool = False,
) -> None:
    """One token for each of the first `num_rows` slots that has not ended. Waits for nothing."""
    rows = slice(num_rows)
    hidden_ND, stream_N, length_N = state.hidden_SD[rows], state.stream_S[rows], state.length_S[rows]
    chunk = max(TILE, LOGITS // model.weights.spec.vocab_size // TILE * TILE)
    parts = [slice(start, start + chunk) for start in range(0, num_rows, chunk)]
    drawn = [_draw(model, hidden_ND[p], stream_N[p], length_N[p], temperature) for p in parts]
    token_N, logp_N, finite_N = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*drawn, strict=True))
    after = model.weights.kernels.note((token_N, logp_N, finite_N), state, stop_K, len(model.rope[0]))

    attend = DecodeAttend(cache, after.position_N, None, model.weights.kernels)
    routes: list[Tensor] | None = [] if record_routing else None
    # Where one scale spans all rows, those that nobody owns, or that ended just now, must not have a say in it.
    spanned = any(map(spans_rows, model.weights.activation.values()))
    next_rows = Rows(tokens_N=after.token_N, positions_N=after.position_N, mask_N=after.owned_N if spanned else None)
    hidden_ND.copy_(model.hidden(next_rows, attend, routes))
    if routes is not None and state.routing_SRLK is not None:
        # Of a slot that has ended nothing is read behind its length, less than R: a prompt has a token at least.
        new_N1LK = torch.stack(routes, dim=1)[:, None]
        state.routing_SRLK[rows].scatter_(1, length_N[:, None, None, None].expand_as(new_N1LK), new_N1LK)


def _draw(
    model: Model, hidden_ND: Tensor, stream_N: Tensor, position_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Token, its log-probability, and whether all of them are finite, which they are not where a logit is not."""
    logits_NV = model.logits(hidden_ND)
    logp_NV = log_probs(logits_NV, temperature)
    token_N, token_logp_N, finite_N = model.weights.kernels.draw(logp_NV, stream_N, position_N)
    if temperature == 0:
        token_N = logits_NV.argmax(dim=-1)
        token_logp_N = logp_NV.gather(1, token_N[:, None]).squeeze(1)
    return token_N, token_logp_N, finite_N
