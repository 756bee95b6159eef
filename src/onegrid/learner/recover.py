"""What a learner owes after a failure in the middle of a step: nothing half-done, and a hint where memory ran out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import CheckpointError


@contextmanager
def without_leftovers(optimizer: torch.optim.Optimizer, *, max_tokens: int, recompute: bool) -> Iterator[None]:
    """Drops gradients when what is inside fails, so that the next step begins from none. The error goes on.

    A torch.OutOfMemoryError carries a note with the settings that would lower the need.
    """
    try:
        yield
    except BaseException as error:
        optimizer.zero_grad(set_to_none=True)
        if isinstance(error, torch.OutOfMemoryError):
            less = "" if recompute else " or set learner.recompute = true"
            error.add_note(
                f"the learner ran out of memory and dropped the step; lower learner.max_tokens (now {max_tokens}){less}"
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        raise


@contextmanager
def saying_what_waits(version: int) -> Iterator[None]:
    """A note on a torch.OutOfMemoryError while a version is quantized: its update is made, its codes are not yet."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(
            f"the learner ran out of memory while it quantized version {version}; the update is made, and whoever asks "
            'for its codes quantizes again; lower sampler.max_slots, or in another run set learner.weights = "codes"'
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise


def make_room(optimizer: torch.optim.AdamW) -> None:
    """Allocates the moments that an update will need, before any number changes: each parameter's at once or not."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or optimizer.state[parameter]:
                continue
            step = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu")
            moments = [torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(2)]
            optimizer.state[parameter] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}


def refuse_lost_moments(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor], moments: Mapping[int, Mapping[str, Any]]
) -> None:
    """The optimizer would take an absent moment for a first step, and go on with another update in silence."""
    names = {id(tensor): key for key, tensor in trained.items()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, param in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = moments.get(i, {}).get(name)
            found = "is missing" if moment is None else f"has shape {tuple(moment.shape)}"
            if moment is None or moment.shape != param.shape:
                raise CheckpointError(
                    f"the optimizer's {name} of {names[id(param)]} {found}; it must be {tuple(param.shape)}"
                )
