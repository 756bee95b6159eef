"""The steps of the embedded engine: admit, draw, retire, decode, over requests that share one Sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from onegrid.errors import NonFiniteError
from onegrid.model.decoder import Rows
from onegrid.ops.logprob import CHUNK_ELEMENTS, log_probs
from onegrid.ops.pins import TILE
from onegrid.sampler.cache import Cache, DecodeAttend, Prefilled, PrefixStore
from onegrid.sampler.draw import kept_set, streams, truncates
from onegrid.sampler.prefill import Model, chunks, prefill
from onegrid.sampler.scheduler import Scheduler
from onegrid.sampler.stops import DecodeText, hit_stop_string, hit_stop_token, text_of
from onegrid.types import Request, Rollout, Sampling


class Generation:
    """Completions of one call that share a Sampling, from first admission to last token."""

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        *,
        cache: Cache,
        prefixes: PrefixStore,
        max_slots: int,
        decode_text: DecodeText | None,
    ) -> None:
        self.model, self.requests, self.cache, self.prefixes = model, requests, cache, prefixes
        self.sampling: Sampling = requests[0].sampling
        self.decode_text = decode_text
        spec, device = model.weights.spec, model.weights.device
        slots = min(max_slots, len(requests))
        self.scheduler = Scheduler(requests, self.sampling, max_slots=slots, device=device)
        self.stream_Q = streams(requests, device)
        self.waiting = Counter(request.prompt_tokens for request in requests)
        self.hidden_SD = torch.zeros(slots, spec.hidden_size, dtype=torch.bfloat16, device=device)
        self.kept: dict[int, list[Tensor]] | None = {} if truncates(self.sampling) else None
        self.routing_SRLE: Tensor | None = None
        if self.sampling.record_routing:
            shape = (slots, self.sampling.max_new_tokens, len(spec.moe_layers), spec.top_k)
            self.routing_SRLE = torch.zeros(shape, dtype=torch.int16, device=device)

    def run(self) -> Iterator[tuple[int, Rollout]]:
        """(index of the request, its rollout), as they end."""
        while self.scheduler.waiting or self.scheduler.num_running:
            self.admit()
            self.draw()
            yield from self.retire()
            self.decode()

    def admit(self) -> None:
        """Prefills waiting prompts into free slots; samples of one prompt share its prefill."""
        admitted = self.scheduler.admit()
        first = self.scheduler.num_running - len(admitted)
        slots: dict[tuple[int, ...], list[int]] = {}
        for slot, index in enumerate(admitted, start=first):
            slots.setdefault(self.requests[index].prompt_tokens, []).append(slot)
        self.fill(slots)

    def fill(self, slots: Mapping[tuple[int, ...], list[int]]) -> None:
        """Brings each prompt's keys, values and last hidden state into its slots, computed once per prompt."""
        self.waiting.subtract(Counter({prompt: len(s) for prompt, s in slots.items()}))
        fresh = []
        for prompt, where in slots.items():
            known = self.prefixes.get(self.model.version, prompt)
            if known is None or (known.routing_BLE is None and self.routing_SRLE is not None):
                fresh.append(prompt)
            else:
                self._load(known, [(slot, 0) for slot in where])
        for chunk in chunks(fresh, self.model.prefill_tokens):
            batch = prefill(self.model, chunk, record_routing=self.routing_SRLE is not None)
            self._load(batch, [(slot, row) for row, prompt in enumerate(chunk) for slot in slots[prompt]])
            for row, prompt in enumerate(chunk):
                if self.waiting[prompt] > 0:
                    self.prefixes.put(self.model.version, prompt, batch.one(row, len(prompt)))

    def draw(self) -> None:
        """One token for every running completion, from the hidden state of its last position."""
        running = self.scheduler.num_running
        rows = max(TILE, CHUNK_ELEMENTS // self.model.weights.spec.vocab_size // TILE * TILE)
        drawn = [self._draw(slice(i, min(i + rows, running))) for i in range(0, running, rows)]
        token_N, logp_N = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        self.scheduler.append(token_N, logp_N)
        stop_N = hit_stop_token(token_N, self.sampling)
        if self.sampling.stop_strings:
            assert self.decode_text is not None
            tokens_NR, length_N = self.scheduler.tokens_SR[:running], self.scheduler.length_S[:running]
            stop_N |= hit_stop_string(tokens_NR, length_N, self.sampling, self.decode_text)
        self.scheduler.end(stop_N)

    def _draw(self, rows: slice) -> tuple[Tensor, Tensor]:
        sampling = self.sampling
        logits_NV = self.model.logits(self.hidden_SD[rows])
        self._refuse_non_finite(logits_NV, rows)
        logp_NV = log_probs(logits_NV, sampling.temperature)
        if self.kept is not None:
            keep_NV = kept_set(logp_NV, sampling)
            logp_NV = log_probs(logits_NV, sampling.temperature, keep_NV)
            self._record_kept(keep_NV, rows)
        if sampling.temperature == 0:
            token_N = logits_NV.argmax(dim=-1)
        else:
            stream_N = self.stream_Q[self.scheduler.request_S[rows]]
            token_N = self.model.draw(logp_NV, stream_N, self.scheduler.length_S[rows])
        return token_N, logp_NV.gather(1, token_N[:, None]).squeeze(1)

    def retire(self) -> Iterator[tuple[int, Rollout]]:
        """Hands out what has ended and closes the gaps."""
        ended, source, target = self.scheduler.leave()
        if not len(ended):
            return
        yield from self._rollouts(ended)
        if len(source):
            self.cache.move(source, target, self._longest())
            self.hidden_SD[target] = self.hidden_SD[source]
            if self.routing_SRLE is not None:
                self.routing_SRLE[target] = self.routing_SRLE[source]
        self.scheduler.move(source, target, len(ended))

    def decode(self) -> None:
        """Runs the token just drawn of every running completion through the decoder."""
        running = self.scheduler.num_running
        if running == 0:
            return
        length_N = self.scheduler.length_S[:running]
        token_N = self.scheduler.tokens_SR[:running].gather(1, length_N[:, None] - 1).squeeze(1)
        position_N = self.scheduler.prompt_S[:running] + length_N - 1
        routes: list[Tensor] | None = None if self.routing_SRLE is None else []
        rows = Rows(tokens_N=token_N, positions_N=position_N, mask_N=None)
        attend = DecodeAttend(self.cache, position_N, self._longest(), self.model.weights.kernels)
        self.hidden_SD[:running] = self.model.hidden(rows, attend, routes)
        if self.routing_SRLE is not None and routes:
            slot_N = torch.arange(running, device=length_N.device)
            self.routing_SRLE[slot_N, length_N] = torch.stack(routes, dim=1)

    def _longest(self) -> int:
        running = slice(self.scheduler.num_running)
        return int((self.scheduler.prompt_S[running] + self.scheduler.length_S[running]).max())

    def _load(self, batch: Prefilled, places: list[tuple[int, int]]) -> None:
        """Prompts of a batch into slots: places are (slot, row of the batch)."""
        slot_M, row_M = torch.tensor(places, device=self.hidden_SD.device).T
        self.cache.load(slot_M, row_M, batch.keys, batch.values)
        self.hidden_SD[slot_M] = batch.hidden_BD[row_M]
        if self.routing_SRLE is not None and batch.routing_BLE is not None:
            self.routing_SRLE[slot_M, 0] = batch.routing_BLE[row_M]

    def _refuse_non_finite(self, logits_NV: Tensor, rows: slice) -> None:
        finite_N = torch.isfinite(logits_NV).all(dim=-1)
        if bool(finite_N.all()):
            return
        slot = rows.start + int((~finite_N).nonzero()[0, 0])
        request = self.requests[int(self.scheduler.request_S[slot])]
        raise NonFiniteError(
            f"logits of {int((~finite_N).sum())} completions are not finite; the first: prompt {request.prompt_index}, "
            f"sample {request.sample}, response token {int(self.scheduler.length_S[slot])}, "
            f"weights of version {self.model.version}"
        )

    def _record_kept(self, keep_NV: Tensor, rows: slice) -> None:
        assert self.kept is not None
        ids = keep_NV.nonzero()[:, 1].split(keep_NV.sum(dim=1).tolist())
        for index, kept in zip(self.scheduler.request_S[rows].tolist(), ids, strict=True):
            self.kept.setdefault(index, []).append(kept.cpu().clone())

    def _rollouts(self, slots: Tensor) -> Iterator[tuple[int, Rollout]]:
        scheduler, version = self.scheduler, self.model.version
        tokens_ER, logp_ER = scheduler.tokens_SR[slots].cpu(), scheduler.logp_SR[slots].cpu()
        routing_ERLE = None if self.routing_SRLE is None else self.routing_SRLE[slots].cpu()
        state = (scheduler.request_S, scheduler.length_S, scheduler.stopped_S)
        for row, (index, length, stopped) in enumerate(zip(*(x[slots].tolist() for x in state), strict=True)):
            finish = "stop" if stopped else "length"
            tokens_R = tokens_ER[row, :length].clone()
            yield (
                index,
                Rollout(
                    request=self.requests[index],
                    tokens_R=tokens_R,
                    logp_R=logp_ER[row, :length].clone(),
                    version_R=torch.full((length,), version, dtype=torch.int64),
                    finish=finish,
                    text=text_of(tokens_R.tolist(), finish, self.sampling, self.decode_text),
                    kept=None if self.kept is None else tuple(self.kept.pop(index)),
                    routing_RLE=None if routing_ERLE is None else routing_ERLE[row, :length].clone(),
                ),
            )
