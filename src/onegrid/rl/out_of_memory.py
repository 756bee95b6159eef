"""What to lower when memory runs out, by the stage of a step in which it did."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onegrid.errors import OutOfMemoryError

LEARNER = (
    "lower learner.max_tokens (rows of a micro-batch), set learner.recompute = true (keeps less for the backward), "
    "or, in another run, lower sampling.max_new_tokens"
)
SAMPLER = (
    "lower sampler.max_slots (completions at once), sampler.max_len (positions of each), sampler.prefill_tokens or "
    "sampler.prefix_tokens"
)
ADVICE = {
    "start": f"{SAMPLER}; set loop.reference_every = 0 (no second set of weights), or take a smaller model",
    "rollout": SAMPLER,
    "wait": SAMPLER,
    "eval": SAMPLER,
    "scoring": "lower task.scoring.workers, or what the reward functions take",
    "reference": LEARNER,
    "logprob": LEARNER,
    "update": LEARNER,
    "sync": f"lower guard.bucket_bytes; if that does not help, {SAMPLER}",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)  # the CPU allocator raises a bare RuntimeError
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "CUDA out of memory" in text)


def advice(stage: str, error: BaseException) -> OutOfMemoryError:
    """The error that a person sees: in what stage, what the allocator said, and what to lower."""
    first = (str(error).splitlines() or [""])[0]
    first = first.partition("] ")[2] or first  # without the place in torch's own source
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return OutOfMemoryError(
        f"out of memory in stage {stage!r} ({said}); {ADVICE.get(stage, ADVICE['start'])}. "
        "The record is whole up to the step before, and --resume goes on from the last checkpoint with such settings"
    )


@contextmanager
def advised(stage: str) -> Iterator[None]:
    """Turns what an allocator says inside into an OutOfMemoryError."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise advice(stage, error) from error
