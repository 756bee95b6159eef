"""What the checks leave in the record of a run: metrics of those that ran, incidents of those that did not pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from onegrid.errors import MismatchError, NonFiniteError, SyncError
from onegrid.guard.guard import GuardReport
from onegrid.guard.verdict import FailedChecks, Verdict
from onegrid.learner.learner import Learner
from onegrid.rl.clock import Clock
from onegrid.rl.out_of_memory import advice, is_out_of_memory
from onegrid.rl.record import Incident, Record


def guard_metrics(verdicts: Sequence[Verdict], synced: Mapping[str, float]) -> dict[str, float]:
    """`guard/<check>` of a step and its synchronization: 1 passed, 0 failed, -1 could not tell; the worse of two.

    synced  metrics of the synchronization, which come along
    """
    metrics = dict(synced)
    for v in verdicts:
        key = f"guard/{v.check}"
        metrics[key] = min(metrics.get(key, 1), v.metric)
    return metrics


def helped(record: Record, report: GuardReport, *, step: int, version: int) -> None:
    """Incidents of a synchronization that the policy of the configuration has saved."""
    for v in report.failures:
        record.incident(_incident(v, step=step, version=version, action=report.action))


@contextmanager
def incidents(record: Record, learner: Learner, step: int, clock: Clock | None = None) -> Iterator[None]:
    """A check that fails inside, or memory that runs out, leaves a line in incidents.jsonl on its way up.

    clock  knows the stage in which memory ran out
    """
    version = learner.version
    try:
        yield
    except FailedChecks as error:
        for v in error.verdicts:
            action = "the run stopped; the version before keeps serving"
            record.incident(_incident(v, step=step, version=learner.version, action=action))
        raise
    except (SyncError, MismatchError, NonFiniteError) as error:
        condition, check = "C6", "mismatch" if isinstance(error, MismatchError) else "finite"
        if isinstance(error, SyncError):
            condition, check = error.condition, "sync"
        record.incident(
            Incident(
                step=step,
                version=version,
                check=check,
                condition=condition,
                tensors=error.tensors if isinstance(error, SyncError) else (),
                expected=_EXPECTED[check],
                found=str(error),
                likely_cause=_CAUSES[check],
                action="the run stopped before the update",
            )
        )
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        stage = clock.stage if clock else "start"
        wrong = advice(stage, error)
        record.incident(
            Incident(
                step=step,
                version=version,
                check="memory",
                condition="",
                tensors=(),
                expected="memory for the step",
                found=f"none left in stage {stage!r}: {error}",
                likely_cause="a step that is larger than those before, or another program on the same device",
                action=str(wrong),
            )
        )
        raise wrong from error


def _incident(v: Verdict, *, step: int, version: int, action: str) -> Incident:
    return Incident(
        step=step,
        version=version,
        check=v.check,
        condition=v.condition,
        tensors=v.tensors,
        expected=v.expected,
        found="; ".join([v.found, *v.where]),
        likely_cause=v.cause,
        action=action,
    )


_EXPECTED = {
    "sync": "a version that is whole and proved in the sampler",
    "mismatch": "log-probabilities of the same tokens, of one shape and dtype",
    "finite": "finite numbers",
}
_CAUSES = {
    "sync": "the sampler lost its weights, or never had them",
    "mismatch": "sequences that were packed differently on the two sides",
    "finite": "weights or gradients that overflowed, or a learning rate that is too high",
}
