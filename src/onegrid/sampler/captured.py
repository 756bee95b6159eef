"""Generation on captured steps: the host runs one step behind, so that the device never waits for it.

Step n + 1 is on its way while the host reads who ended in step n. Whoever ended goes along for one step more, in which
nothing of theirs changes. The tokens are those of `Generation`, byte for byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from onegrid.errors import NonFiniteError
from onegrid.ops.logprob import log_probs
from onegrid.ops.note import ENDED, FINITE, LENGTH, STOPPED
from onegrid.sampler.cache import Cache, PrefixStore
from onegrid.sampler.draw import truncates
from onegrid.sampler.generation import Generation
from onegrid.sampler.graphs import Graphs
from onegrid.sampler.prefill import Model, prefill
from onegrid.sampler.stops import DecodeText, text_of
from onegrid.types import Request, Rollout, Sampling


def can_capture(sampling: Sampling) -> bool:
    """Kept sets and stop strings need the host in the middle of a step."""
    return not (truncates(sampling) or sampling.stop_strings)


def probe_captured(graphs: Graphs, model: Model, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """FP32 [V] log-probabilities after each prompt, its last token run through a captured step."""
    out: list[Tensor] = []
    state, sampling = graphs.state, Sampling()
    device = state.hidden_SD.device
    for start in range(0, len(prompts), graphs.num_slots):
        part = [tuple(prompt) for prompt in prompts[start : start + graphs.num_slots]]
        state.report_4S[ENDED] = 1
        for slot, prompt in enumerate(part):
            if len(prompt) > 1:
                batch = prefill(model, [prompt[:-1]], record_routing=False)
                graphs.cache.load(
                    torch.tensor([slot], device=device), torch.tensor([0], device=device), batch.keys, batch.values
                )
        rows = slice(len(part))
        state.prompt_S[rows] = torch.tensor([len(prompt) - 1 for prompt in part], device=device)
        state.forced_S[rows] = torch.tensor([prompt[-1] for prompt in part], device=device)
        state.length_S[rows], state.limit_S[rows], state.report_4S[ENDED, rows] = 0, 2, 0  # nobody ends in this step
        try:
            graphs.replay(model, len(part), sampling)
        finally:
            state.forced_S[rows] = -1  # or the next completions would be made of these tokens
        out += log_probs(model.logits(state.hidden_SD[rows]), 1.0).cpu().unbind()
    return out


class CapturedGeneration(Generation):
    """As `Generation`, for a Sampling that `can_capture`."""

    def __init__(
        self,
        model: Model,
        requests: Sequence[Request],
        *,
        cache: Cache,
        prefixes: PrefixStore,
        max_slots: int,
        decode_text: DecodeText | None,
        graphs: Graphs,
    ) -> None:
        super().__init__(model, requests, cache=cache, prefixes=prefixes, max_slots=max_slots, decode_text=decode_text)
        self.graphs, self.state = graphs, graphs.state
        self.hidden_SD = self.state.hidden_SD
        if self.sampling.record_routing:
            spec = model.weights.spec
            self.routing_SRLE = graphs.record_routing(len(spec.moe_layers), spec.top_k)
        self.max_slots = max_slots
        self.queue = deque(range(len(requests)))
        self.owners: list[int] = []
        """Request of each running slot."""
        self.steps: list[int] = []
        """Steps that each running slot has been through."""

    def run(self) -> Iterator[tuple[int, Rollout]]:
        """(index of the request, its rollout), as they end."""
        self.state.report_4S[ENDED] = 1  # whatever an interrupted call left behind
        behind: _Report | None = None
        leaving: deque[_Leaving] = deque()
        gone: set[int] = set()
        while self.queue or self.owners:
            self.enter()
            self.graphs.replay(self.model, len(self.owners), self.sampling)
            self.steps = [count + 1 for count in self.steps]
            report = _Report(self.state.report_4S[:, : len(self.owners)], list(self.owners))
            ended = self._known() if behind is None else behind.ended(self.model.version, self.requests)
            ended |= self._known()
            behind = report
            slots = [slot for slot, owner in enumerate(self.owners) if owner in ended and owner not in gone]
            if slots:
                gone |= {self.owners[slot] for slot in slots}
                leaving.append(_Leaving(self, slots))
                self._close(slots)
            while leaving and (leaving[0].arrived.query() or not (self.queue or self.owners)):
                yield from leaving.popleft().rollouts()
        if behind is not None:
            behind.ended(self.model.version, self.requests)  # the last step's logits must be finite too
        while leaving:
            yield from leaving.popleft().rollouts()

    def enter(self) -> None:
        """Waiting requests into free slots."""
        first = len(self.owners)
        count = min(self.max_slots - first, len(self.queue))
        if not count:
            return
        admitted = [self.queue.popleft() for _ in range(count)]
        slots: dict[tuple[int, ...], list[int]] = {}
        for slot, index in enumerate(admitted, start=first):
            slots.setdefault(self.requests[index].prompt_tokens, []).append(slot)
        self.fill(slots)
        device, rows = self.hidden_SD.device, slice(first, first + count)
        index_M = torch.tensor(admitted, device=device)
        lengths = [len(self.requests[index].prompt_tokens) for index in admitted]
        self.state.prompt_S[rows] = torch.tensor(lengths, device=device)
        self.state.length_S[rows] = 0
        self.state.limit_S[rows] = self.sampling.max_new_tokens
        self.state.stream_S[rows] = self.stream_Q[index_M]
        self.state.report_4S[:, rows] = 0
        self.state.report_4S[FINITE, rows] = 1
        self.owners += admitted
        self.steps += [0] * count

    def _known(self) -> set[int]:
        """Who is at the cap: that needs no look at the device."""
        limit = self.sampling.max_new_tokens
        return {owner for owner, count in zip(self.owners, self.steps, strict=True) if count >= limit}

    def _close(self, slots: list[int]) -> None:
        """Fills the gaps with the last running completions."""
        remaining = len(self.owners) - len(slots)
        holes = [slot for slot in slots if slot < remaining]
        leaving = set(slots)
        last = [slot for slot in range(remaining, len(self.owners)) if slot not in leaving]
        device = self.hidden_SD.device
        self.state.report_4S[ENDED, torch.tensor(slots, device=device)] = 1
        if last:
            source, target = torch.tensor([last, holes], device=device)
            longest = max(len(self.requests[self.owners[s]].prompt_tokens) + self.steps[s] for s in last)
            self.cache.move(source, target, longest)
            self.state.move(source, target)
        for hole, slot in zip(holes, last, strict=True):
            self.owners[hole], self.steps[hole] = self.owners[slot], self.steps[slot]
        del self.owners[remaining:], self.steps[remaining:]


class _Report:
    """What a step said, on its way to the host."""

    def __init__(self, report_4N: Tensor, owners: list[int]) -> None:
        self.owners = owners
        self.held_4N = torch.empty(report_4N.shape, dtype=torch.int64, pin_memory=True)
        self.held_4N.copy_(report_4N, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def ended(self, version: int, requests: Sequence[Request]) -> set[int]:
        """Requests that have ended. NonFiniteError where logits were not finite."""
        self.arrived.synchronize()
        bad = [owner for owner, finite in zip(self.owners, self.held_4N[FINITE].tolist(), strict=True) if not finite]
        if bad:
            request = requests[bad[0]]
            length = int(self.held_4N[LENGTH, self.owners.index(bad[0])])
            raise NonFiniteError(
                f"logits of {len(bad)} completions are not finite; the first: prompt {request.prompt_index}, "
                f"sample {request.sample}, response token {length - 1} or before, weights of version {version}"
            )
        return {owner for owner, ended in zip(self.owners, self.held_4N[ENDED].tolist(), strict=True) if ended}


class _Leaving:
    """Responses that have ended, on their way to the host."""

    def __init__(self, generation: CapturedGeneration, slots: list[int]) -> None:
        self.generation = generation
        self.owners = [generation.owners[slot] for slot in slots]
        slot_E = torch.tensor(slots, device=generation.hidden_SD.device)
        state, width = generation.state, generation.sampling.max_new_tokens
        parts = [state.tokens_SR[slot_E, :width], state.logp_SR[slot_E, :width], state.report_4S[:, slot_E]]
        if generation.routing_SRLE is not None:
            parts.append(generation.routing_SRLE[slot_E, :width])
        self.parts = []
        for part in parts:
            held = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
            self.parts.append(held.copy_(part, non_blocking=True))
        self.arrived = torch.cuda.Event()
        self.arrived.record()

    def rollouts(self) -> Iterator[tuple[int, Rollout]]:
        """Waits for the copies and makes the rollouts."""
        self.arrived.synchronize()
        generation = self.generation
        tokens_ER, logp_ER, report_4E, *rest = self.parts
        routing_ERLK = rest[0] if rest else None
        lengths, stops = report_4E[LENGTH].tolist(), report_4E[STOPPED].tolist()
        for row, (index, length, stopped) in enumerate(zip(self.owners, lengths, stops, strict=True)):
            finish = "stop" if stopped else "length"
            tokens_R = tokens_ER[row, :length].clone()
            text = text_of(tokens_R.tolist(), finish, generation.sampling, generation.decode_text)
            yield (
                index,
                Rollout(
                    request=generation.requests[index],
                    tokens_R=tokens_R,
                    logp_R=logp_ER[row, :length].clone(),
                    version_R=torch.full((length,), generation.model.version, dtype=torch.int64),
                    finish=finish,
                    text=text,
                    routing_RLE=None if routing_ERLK is None else routing_ERLK[row, :length].clone(),
                ),
            )
