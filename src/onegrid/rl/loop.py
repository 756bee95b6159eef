"""The algorithm on one page: sample, score, learn, check that it was one policy, publish, and again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from onegrid.errors import ConfigError, TaskError
from onegrid.guard.guard import Guard, check_step, guard_sync, keep_in_bf16
from onegrid.learner.learner import Learner
from onegrid.mismatch.metrics import compare, mirror_rollout_corr
from onegrid.model.canonical import Snapshot
from onegrid.rl import checkpoint
from onegrid.rl.advantage import advantages_of
from onegrid.rl.batch import group_rollouts, make_requests, pack
from onegrid.rl.clock import Clock
from onegrid.rl.dynamic import DynamicConfig, draw_groups
from onegrid.rl.evaluate import EvalConfig, evaluate
from onegrid.rl.old_policy import CorrectionConfig, old_policy
from onegrid.rl.one_policy import guard_metrics, helped, incidents
from onegrid.rl.progress import Display
from onegrid.rl.record import Record, check_whole
from onegrid.rl.rewards import score_rollouts
from onegrid.rl.summary import is_informative, rollout_metrics
from onegrid.rl.tasks import Task, Tokenizer
from onegrid.sampler.base import Sampler
from onegrid.sync import SyncReport
from onegrid.types import Group, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """How long, and how much a step."""

    num_steps: int = 100
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    truncated: Literal["keep", "mask"] = "keep"
    """Whether completions that were cut at the cap take part in the loss."""
    reference_every: int = 1
    """Compare with the policy of the start in every so many steps, at the price of a forward pass; 0: never.
    loss.kl_coefficient needs every step."""
    max_constant_steps: int = 50
    """So many steps in a row without a group whose rewards differ end the run."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt", "max_constant_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_steps < 0 or self.reference_every < 0:
            raise ConfigError(f"num_steps {self.num_steps} and reference_every {self.reference_every}: not below 0")
        if self.samples_per_prompt == 1:
            raise ConfigError("samples_per_prompt is 1; a group of one has no advantage, it takes at least 2")


def train(
    task: Task,
    learner: Learner,
    sampler: Sampler,
    *,
    guard: Guard,
    config: LoopConfig,
    sampling: Sampling,
    seed: int,
    tokenizer: Tokenizer,
    record: Record,
    display: Display,
    dynamic: DynamicConfig,
    correction: CorrectionConfig,
    evaluation: EvalConfig,
    checkpoints: checkpoint.CheckpointConfig,
    reference: Learner | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Train up to `config.num_steps`, leaving everything in `record`.

    reference  the policy of the start, for train/ref_kl
    state      what `checkpoint.load` gave, to go on from; the learner takes its part of it
    guard      the checks of every synchronization and step
    Raises OnegridError of the kind that fits; a failed check leaves an incident and stops the run before the update.
    """
    done, constant_steps = 0, 0
    if state is not None:
        if state.get("bf16"):
            keep_in_bf16(learner, sampler, guard, state["bf16"])
        learner.load_state_dict(state["learner"])
        done, constant_steps = state["step"], state["constant_steps"]

    def draw(step: int, attempt: int) -> list[Group]:
        prompts = task.prompts(step, attempt)
        requests = make_requests(prompts, config.samples_per_prompt, seed=step_seed(seed, step), sampling=sampling)
        return score_rollouts(task, group_rollouts(sampler.generate(requests)), prompts=prompts)

    def evaluated() -> dict[str, float]:
        return evaluate(task, sampler, num_problems=evaluation.num_problems, sampling=sampling)

    with incidents(record, learner, done):
        sync = guard_sync(learner, sampler, guard)
    helped(record, sync, step=done, version=learner.version)
    if done == 0:
        record.metrics(0, evaluated())
    for step in range(done + 1, config.num_steps + 1):
        clock = Clock()
        with incidents(record, learner, step):
            with clock("rollout"):
                drawn = draw_groups(partial(draw, step), num_groups=config.prompts_per_step, config=dynamic)
            batch = pack(
                drawn.groups,
                advantages_of(drawn.groups, config.advantage),
                truncated=config.truncated,
                temperature=sampling.temperature,
            )
            with clock("reference"):
                due = reference is not None and step % config.reference_every == 0
                reference_logp = reference.log_probs(batch) if reference and due else None
            with clock("logprob"):
                old = old_policy(learner, batch, correction)
            with clock("update"):
                report = learner.forward_backward(batch, reference_logp=reference_logp, **old)
            sequences = batch.sequences
            apart = compare(report.logp, [s.sampler_logp_R for s in sequences], [s.mask_R for s in sequences])
            apart |= mirror_rollout_corr(apart)
            verdicts = check_step(guard, apart, batch, version=learner.version)
            with clock("update"):
                updated = learner.step()
            with clock("sync"):
                sync = guard_sync(learner, sampler, guard)
        helped(record, sync, step=step, version=learner.version)
        metrics = rollout_metrics(drawn.generated) | report.metrics | apart | updated | sync_metrics(sync.sync)
        metrics |= guard_metrics(verdicts, sync)
        last = step == config.num_steps
        if last or (evaluation.every and step % evaluation.every == 0):
            with clock("eval"):
                metrics |= evaluated()
        record.rollouts(step, drawn.generated, tokenizer.decode)
        metrics |= clock.metrics(num_tokens=sum(r.tokens_R.numel() for g in drawn.generated for r in g.rollouts))
        record.metrics(step, metrics)
        display.step(step, metrics)
        if drawn.message:
            display.note(drawn.message)
        constant_steps = 0 if any(is_informative(g) for g in drawn.groups) else constant_steps + 1
        if last or (checkpoints.every and step % checkpoints.every == 0):
            record.sync()
            kept = {"learner": learner.state_dict(), "step": step, "constant_steps": constant_steps, "bf16": guard.bf16}
            checkpoint.save(record.folder, step, kept, keep=checkpoints.keep)
        if constant_steps >= config.max_constant_steps:
            raise TaskError(
                f"for {constant_steps} steps no group had rewards that differ, so nothing was learned; "
                "the task is too easy or too hard for this model, or its verifier is broken"
            )
    check_whole(record.folder, config.num_steps)


def snapshot(learner: Learner) -> Snapshot:
    """The learner's weights of this version, as the sampler must hold them."""
    return Snapshot(version=learner.version, plan_digest=learner.plan.digest, tensors=learner.canonical())


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """What a synchronization moved."""
    metrics: dict[str, float] = {"sync/bytes": report.num_bytes, "sync/tensors": report.num_tensors}
    if report.codes_changed_share is not None:
        metrics["sync/codes_changed_share"] = report.codes_changed_share
    return metrics


def step_seed(seed: int, step: int) -> int:
    """Seed of the requests of one step, from that of the run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=7).digest(), "little")
