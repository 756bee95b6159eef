"""Which checks of a guard run, their limits and turns, and what a failed one does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from onegrid.errors import ConfigError
from onegrid.guard import health
from onegrid.sync import DEFAULT_BUCKET_BYTES

CHECKS = ("bytes", "audit", "digest", "storage", "selfcheck", "probe", "freshness", "sentinel")
"""Beside these the transaction (C5) is part of every synchronization and cannot be switched off."""

Policy = Literal["stop", "resend", "bf16"]
Unknown = Literal["stop", "record"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """Which checks run, and what a failed one does."""

    off: tuple[str, ...] = ()
    """Checks that do not run. What is not checked is shown as such in the report."""
    on_failure: Policy = "stop"
    """"stop" the run; "resend" once, then stop; "bf16": resend once, then keep the named tensors in BF16 on both sides
    and go on, which the record says."""
    unknown: Unknown = "stop"
    """What `could not tell` does: stop as a failure does, or only stand in the record."""
    linears_per_sync: int = 1
    """How many linears the self-check takes each time, all experts of a layer counting as one; so many storage keys
    are also quantized and derived again on both sides, whatever their digests say. All have their turn in so many
    synchronizations as this goes into their number."""
    probe_every: int = 8
    """Synchronizations from probe to probe, where the sampler decodes without graphs, promises bits and shows what it
    reads, so that digest and storage check have seen what a probe can see; any other is probed every time. One with
    graphs and bits is probed through a graph every time, and without one in these turns too."""
    probe_band: float | None = None
    """Largest mean difference (nats) of 8 tokens of a probe from an engine that promises no bits."""
    calibration: str = ""
    """File with the expected mismatch of a pairing that is not exact; see `sentinel.calibrate`."""
    replay_every: int = 8
    """Versions from replay to replay, where the pairing is not exact: some sequences of the step's batch are computed
    again on the plan's grids, and the sampler's log-probabilities are held against that; 0 leaves it out. A mixed plan
    needs memory for a second copy of the weights meanwhile."""
    replay_sequences: int = 32
    """Sequences of a replay, of as many prompts as there are."""
    replay_band: float = 1.0
    """Factor on what is allowed where a replay cannot promise the sampler's bits: the nats that one step of BF16 in
    every output of a linear and of attention makes. An engine that rounds more needs more."""
    traces: bool = False
    """At every turn of a replay, compare what each layer of the sampler gives with a replay, byte for byte, so that the
    sentinel names the first layer that differs. Two forward passes over `replay_sequences`, by the embedded engine."""
    truncated_limit: float = 1.0
    """Share of a step's answers that may end at the cap of new tokens; above it the step is refused. 1: any."""
    entropy_low: float = 0.0
    """Mean entropy of a token, as a share of that of a uniform choice, below which a step is refused. 0: any."""
    entropy_high: float = 1.0
    """The same, above which a step is refused. 1: any."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    @property
    def limits(self) -> health.Limits:
        """Of a step's answers."""
        return health.Limits(self.truncated_limit, (self.entropy_low, self.entropy_high))

    def __post_init__(self) -> None:
        _ = self.limits  # raises ConfigError
        unknown = [name for name in self.off if name not in CHECKS]
        if unknown:
            raise ConfigError(f"off names {', '.join(unknown)}; the checks are {', '.join(CHECKS)}")
        for name, allowed in (("on_failure", get_args(Policy)), ("unknown", get_args(Unknown))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(allowed)}")
        for name in ("linears_per_sync", "bucket_bytes", "probe_every", "replay_sequences"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.replay_every >= 0:
            raise ConfigError(f"replay_every is {self.replay_every}; it must be 0 (none) or more")
        if not 0 < self.replay_band < float("inf"):
            raise ConfigError(f"replay_band is {self.replay_band}; it must be above 0 and finite")
        if self.probe_band is not None and not 0 <= self.probe_band < float("inf"):
            raise ConfigError(f"probe_band is {self.probe_band}; it must be finite and not negative")
