"""Which completions run: waiting ones enter as slots free, ended ones leave, the running stay a prefix of the slots.

Everything known per running completion lives in tensors whose row is the slot, so a step costs no Python per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from onegrid.types import Request, Sampling


class Scheduler:
    """Requests of one Sampling on `max_slots` slots.

    request_S   int64, index of the request that owns the slot
    length_S    int64, tokens of the response so far
    prompt_S    int64, tokens of the prompt
    tokens_SR   int64, logp_SR FP32: the responses
    ended_S     bool, stopped_S bool: done at all; done by a stop token or string
    """

    def __init__(
        self, requests: Sequence[Request], sampling: Sampling, *, max_slots: int, device: torch.device
    ) -> None:
        self.requests = requests
        self.sampling = sampling
        self.max_slots = max_slots
        self.waiting = deque(range(len(requests)))
        self.num_running = 0

        def full(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(max_slots, *shape, dtype=dtype, device=device)

        self.request_S, self.length_S, self.prompt_S = full(), full(), full()
        self.tokens_SR = full(sampling.max_new_tokens)
        self.logp_SR = full(sampling.max_new_tokens, dtype=torch.float32)
        self.ended_S, self.stopped_S = full(dtype=torch.bool), full(dtype=torch.bool)

    def admit(self) -> list[int]:
        """Gives free slots, from num_running on, to waiting requests in their order. Returns their indices."""
        count = min(self.max_slots - self.num_running, len(self.waiting))
        admitted = [self.waiting.popleft() for _ in range(count)]
        if admitted:
            slots = slice(self.num_running, self.num_running + count)
            device = self.request_S.device
            self.request_S[slots] = torch.tensor(admitted, device=device)
            self.prompt_S[slots] = torch.tensor([len(self.requests[i].prompt_tokens) for i in admitted], device=device)
            self.length_S[slots] = 0
            self.ended_S[slots] = False
            self.stopped_S[slots] = False
            self.num_running += count
        return admitted

    def append(self, token_N: Tensor, logp_N: Tensor) -> None:
        """One more token for every running completion."""
        running = slice(self.num_running)
        column_N1 = self.length_S[running, None]
        self.tokens_SR[running].scatter_(1, column_N1, token_N[:, None])
        self.logp_SR[running].scatter_(1, column_N1, logp_N[:, None])
        self.length_S[running] += 1

    def end(self, stop_N: Tensor) -> None:
        """Marks running completions as ended: those where stop_N is True, and those at max_new_tokens."""
        running = slice(self.num_running)
        self.stopped_S[running] = stop_N
        self.ended_S[running] = stop_N | (self.length_S[running] >= self.sampling.max_new_tokens)

    def leave(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns slots (ended, source, target): without the ended, each completion in `source` must move to `target`.

        Rows of the scheduler's own tensors still stand where they stood; read the ended ones, then `move`.
        """
        ended_N = self.ended_S[: self.num_running]
        slots = ended_N.nonzero().squeeze(1)
        remaining = self.num_running - len(slots)
        target = slots[slots < remaining]
        source = remaining + (~ended_N[remaining:]).nonzero().squeeze(1)
        return slots, source, target

    def move(self, source: Tensor, target: Tensor, num_ended: int) -> None:
        """Fills the holes that `leave` found."""
        if len(source):
            for x in (self.request_S, self.length_S, self.prompt_S, self.tokens_SR, self.logp_SR):
                x[target] = x[source]
        self.num_running -= num_ended
        self.ended_S[: self.num_running] = False
        self.stopped_S[: self.num_running] = False
