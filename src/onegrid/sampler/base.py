"""What a sampler is: tokens out, weights in, and an answer to what it runs.

Embedded engine, fake and adapters of other engines all follow this protocol, so that synchronization, guards and the
loop know one kind of sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

import onegrid
from onegrid.types import Bucket, Manifest, Request, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a sampler can do. What it cannot is refused with CapabilityError when asked for."""

    bits: bool
    """Log-probabilities can be the learner's own bits (for plans that say exact)."""
    kept_set: bool
    """Records the kept set of every token under top-p or top-k."""
    routing: bool
    """Records the experts of every token."""
    stop_strings: bool
    captured: bool
    """Has captured graphs, so that probe(captured=True) means something."""
    formats: frozenset[str] | None = None
    """Formats that it can load as codes; None for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """What one canonical tensor is in the running sampler, read from its storage and not from a configuration."""

    format: str
    """Quantizer name, or "bf16"."""
    shape: tuple[int, ...]
    """Logical shape."""
    kernel: str
    """Name of the implementation that reads it."""
    layout: str
    """How the kernel's operand is stored."""
    activation: str | None = None
    """Quantizer that is applied to the kernel's input, "bf16" for none; None where the sampler cannot tell."""


@runtime_checkable
class Sampler(Protocol):
    """Makes tokens with one version of the weights at a time.

    begin, receive, commit and abort are one transaction: until commit returns, and after any failure, the version
    before keeps serving.
    """

    @property
    def version(self) -> int | None:
        """Version that serves; None before the first commit."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def describe(self) -> dict[str, Live]:
        """Every canonical tensor as it is live."""

    def generate(
        self, requests: Sequence[Request], on_finished: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """One rollout per request, in the order of the requests.

        on_finished  is told of each rollout as it ends, in any order, so that scoring need not wait for the last. What
                     it raises ends the call.
        """

    def begin(self, manifest: Manifest) -> None:
        """Open a transaction. SyncError if the manifest does not fit what is live."""

    def receive(self, bucket: Bucket) -> None:
        """Stage the pieces of a bucket. SyncError for a piece that the manifest does not expect."""

    def commit(self, version: int) -> float | None:
        """Make the staged version live, in place, and prove it.

        Returns the share of stored elements (codes, or values of tensors that are not quantized) that differ from the
        version before; None where there was none or the sampler cannot tell. SyncError leaves the version before.
        """

    def abort(self) -> None:
        """Drop the open transaction, or undo a commit after which nothing was generated. Harmless otherwise."""

    def digest(self, names: Iterable[str]) -> dict[str, int]:
        """Digest of each canonical tensor, from the storage that the kernels read."""

    def probe(self, prompts: Sequence[Sequence[int]], captured: bool = False) -> list[Tensor]:
        """FP32 [V] log-probabilities, at temperature 1, of the token after each prompt."""

    def sleep(self) -> None:
        """Give memory back. Nothing is generated until wake."""

    def wake(self) -> None:
        """Serve again, after proof that the weights are those of `version`."""


def engine_of(sampler: Sampler) -> str:
    """Engine and version, as a calibration names them: what the sampler says, else its class and our own version."""
    return str(getattr(sampler, "engine_version", f"{type(sampler).__name__} of onegrid {onegrid.__version__}"))
