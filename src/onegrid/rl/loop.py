"""The algorithm on one page: sample, score, learn, check that it was one policy, publish, and again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from onegrid.errors import StoppedError, TaskError
from onegrid.guard.guard import Guard, check_health, guard_sync, keep_in_bf16
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot
from onegrid.rl import checkpoint
from onegrid.rl.clock import Clock
from onegrid.rl.draw import Drawing
from onegrid.rl.dynamic import Drawn, DynamicConfig
from onegrid.rl.evaluate import EvalConfig, evaluate
from onegrid.rl.experience import make_experience
from onegrid.rl.keep import Keeper
from onegrid.rl.loop_config import LoopConfig
from onegrid.rl.old_policy import CorrectionConfig, old_policy
from onegrid.rl.one_policy import guard_metrics, helped, incidents
from onegrid.rl.progress import Display
from onegrid.rl.record import Record, check_whole
from onegrid.rl.schedule import schedule_of
from onegrid.rl.stop import Stop
from onegrid.rl.stored_rollouts import read_rollouts
from onegrid.rl.tasks import Task, Tokenizer
from onegrid.sampler.base import Sampler
from onegrid.sync import SyncReport
from onegrid.types import Sampling


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
    stop: Stop | None = None,
    replay: Path | None = None,
) -> None:
    """Train up to `config.num_steps`, leaving everything in `record`.

    reference  the policy of the start, for train/ref_kl
    state      what `checkpoint.load` gave, to go on from; the learner takes its part of it
    guard      the checks of every synchronization and step
    stop       once it names a signal, the run ends before its next step, with a checkpoint
    replay     a run directory: learn from its rollouts, step by step; nothing is sampled, published or evaluated
    Raises OnegridError of the kind that fits; a failed check leaves an incident and stops the run before the update.
    StoppedError says that the run did as it was asked and can go on.
    """
    done, constant_steps = 0, 0
    if state is not None:
        with checkpoint.contents():
            done, constant_steps = state["step"], state["constant_steps"]
            if state.get("bf16"):
                keep_in_bf16(learner, sampler, guard, state["bf16"])
            if "charts" in state:
                guard.watch.load_state(state["charts"])
            learner.load_state_dict(state["learner"])
    keeper = Keeper(record, checkpoints, done=None if state is None else done)

    drawing = Drawing(task=task, sampler=sampler, config=config, dynamic=dynamic, sampling=sampling, seed=seed)

    def draw(step: int, clock: Clock) -> Drawn:
        if replay is not None:
            return read_rollouts(replay, step, sampling, vocab_size=learner.spec.vocab_size)
        return drawing.groups(step, clock)

    def publish(step: int) -> dict[str, float]:
        if replay is not None:
            return {}
        report = guard_sync(learner, sampler, guard)
        helped(record, report, step=step, version=learner.version)
        return sync_metrics(report.sync) | report.metrics()

    def evaluated() -> dict[str, float]:
        if replay is not None:
            return {}
        found = evaluate(task, sampler, evaluation, sampling=sampling, seed=seed)
        keeper.check(found)
        return found

    schedule = schedule_of(
        config,
        draw,
        partial(make_experience, config=config, temperature=sampling.temperature, reference=reference),
        learner,
        guard,
        sampling=sampling,
        replayed=replay is not None,
        overlap=not sampler.capabilities.captured,
        state=state,
    )

    def kept(step: int) -> dict[str, Any]:
        now = {"learner": learner.state_dict(), "step": step, "constant_steps": constant_steps, "bf16": guard.bf16}
        return now | {"charts": guard.watch.state()} | schedule.state()

    if replay is not None:
        sampler.sleep()
    with schedule:
        with incidents(record, learner, done, clock := Clock()):
            with clock("sync"):
                publish(done)
            with clock("eval"):
                if state is None:
                    record.metrics(0, evaluated())
        for step in range(done + 1, config.num_steps + 1):
            if stop is not None and stop.signal:
                keeper.save(step - 1, kept(step - 1))
                raise StoppedError(f"{stop.signal}: the checkpoint of step {step - 1} is written")
            last = step == config.num_steps
            with incidents(record, learner, step, clock := Clock()):
                now = schedule.take(step, clock)
                with clock("logprob"):
                    old, corrected = old_policy(learner, now.batch, correction)
                with clock("update"):
                    report = learner.forward_backward(now.batch, reference_logp=now.reference_logp, **old)
                apart, verdicts = schedule.prove(report.logp, clock)
                verdicts = [*verdicts, *check_health(guard, now.metrics | report.metrics, learner=learner)]
                with clock("update"):
                    updated = learner.step()
                with clock("sync"):
                    synced = publish(step)
                metrics = now.metrics | report.metrics | corrected | apart | updated | guard_metrics(verdicts, synced)
                if last or (evaluation.every and step % evaluation.every == 0):
                    with clock("eval"):
                        metrics |= evaluated()
            record.rollouts(step, now.drawn.generated, tokenizer.decode, learned=now.drawn.groups)
            metrics |= clock.metrics(num_tokens=now.num_tokens)
            record.metrics(step, metrics)
            display.step(step, metrics)
            if now.drawn.message:
                display.note(now.drawn.message)
            constant_steps = 0 if now.informative else constant_steps + 1
            if keeper.due(step, metrics, last=last):
                keeper.save(step, kept(step))
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
