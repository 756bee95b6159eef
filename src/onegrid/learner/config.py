"""Optimizer and micro-batching of a run, and the rate of each update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onegrid.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters, the only thing that is trained where this section stands; see learner/lora.py."""

    rank: int
    alpha: float = 32.0
    """B A counts alpha / rank times."""
    targets: tuple[str, ...] = ("all-linear",)
    """Ends of module names, as PEFT reads them ("q_proj", "layers.0.mlp.up_proj"); "all-linear": every projection."""
    init: Literal["uniform", "gaussian"] = "uniform"
    """How A is drawn: uniform within 1 / sqrt(inputs), as PEFT does by default, or normal with deviation 1 / rank.
    B begins at 0, so that the first version has the bytes of the base."""
    seed: int = 0
    adapter: str = ""
    """A folder of PEFT to go on from; relative names start at the configuration file."""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(
                f"rank is {self.rank}; it must be at least 1. Leave learner.lora out to train all weights"
            )
        if not 0.0 < self.alpha < float("inf"):
            raise ConfigError(f"alpha is {self.alpha}; it must be above 0 and finite")
        if not self.targets:
            raise ConfigError('targets is empty; name modules such as "q_proj", or "all-linear"')
        if self.dropout != 0.0:
            raise ConfigError(
                f"dropout is {self.dropout}; it must be 0: adapters are merged before the forward, so that learner and "
                "sampler are one policy, and a dropped input cannot be merged"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """Optimizer and micro-batching of one run."""

    lr: float = 1e-6
    warmup_steps: int = 0
    """Linear warm-up from lr / warmup_steps; a fresh Adam at full speed can undo a good start in one step."""
    decay_steps: int = 0
    """After the warm-up the rate falls linearly, to 0 at this update and beyond; 0 keeps it constant."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    max_grad_norm: float = 1.0
    """The global gradient norm is clipped to this; 0 does not clip."""
    max_tokens: int = 8192
    """Rows of one micro-batch at most; a longer sequence goes alone."""
    recompute: bool = False
    """Gradient checkpointing: keep only layer inputs, compute each layer again in the backward pass."""
    capture: bool = False
    """On a GPU, run the decoder of a micro-batch as CUDA graphs where that is possible; see learner/captured.py."""
    replay_routing: bool = False
    """Visit the experts that the sampler recorded (sampling.record_routing), not those that the router finds here."""
    weights: Literal["decoded", "codes"] = "decoded"
    """"codes" keeps FP32 masters and codes only, and decodes an operand each time a matmul reads it: the same bytes, a
    copy of the model less (4 bytes a weight on a CPU, 2 on a GPU), more time."""
    lora: LoraConfig | None = None
    """Trains adapters instead of the weights."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.lr < float("inf")) or self.warmup_steps < 0:
            raise ConfigError(f"lr {self.lr} must be finite and >= 0 and warmup_steps {self.warmup_steps} >= 0")
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"decay_steps {self.decay_steps} must be beyond warmup_steps {self.warmup_steps}, or 0 for no decay"
            )
        if not (0.0 <= self.beta1 < 1.0 and 0.0 <= self.beta2 < 1.0 and 0.0 < self.eps < float("inf")):
            raise ConfigError(
                f"beta1 {self.beta1} and beta2 {self.beta2} must be in [0, 1) and eps {self.eps} above 0 and finite"
            )
        sound = 0.0 <= self.weight_decay < float("inf") and self.max_grad_norm >= 0.0  # NaN compares as False
        if not sound or self.max_tokens < 1:
            raise ConfigError(
                f"weight_decay {self.weight_decay} must be finite, neither it nor max_grad_norm {self.max_grad_norm} "
                f"negative, and max_tokens {self.max_tokens} at least 1"
            )


def learning_rate(config: LearnerConfig, num_updates: int) -> float:
    """Rate of the update after `num_updates`: a linear warm-up, then constant or a linear decay to 0."""
    warm = min(1.0, (num_updates + 1) / max(1, config.warmup_steps))
    if not config.decay_steps or num_updates < config.warmup_steps:
        return config.lr * warm
    left = (config.decay_steps - num_updates) / (config.decay_steps - config.warmup_steps)
    return config.lr * max(0.0, left)
