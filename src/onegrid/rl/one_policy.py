"""The checks of every step: were these tokens made by the policy that now learns from them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from onegrid.errors import MismatchError, NonFiniteError, SyncError
from onegrid.learner.learner import Learner
from onegrid.rl.record import Incident, Record
from onegrid.types import Batch


def one_policy(mismatch: Mapping[str, float], batch: Batch, *, version: int, exact: bool) -> dict[str, float]:
    """The `guard/` metrics of a step: 1 passed, -1 could not tell. What failed is raised.

    mismatch  of `mismatch.metrics.compare`, empty where no token takes part in the loss
    version   that of the learner, before its update
    exact     whether plan and sampler promise equal bits; only then is there something to expect of the mismatch
    Raises SyncError (C7) if a token was made by another version, MismatchError if promised bits differ.
    """
    others = {int(v) for s in batch.sequences for v in s.version_R.unique()} - {version}
    if others:
        raise SyncError(f"the learner has version {version}, but tokens came from {sorted(others)}", condition="C7")
    if not exact or not mismatch:
        return {"guard/version": 1, "guard/mismatch": -1}
    if mismatch["mismatch/share_equal"] != 1.0:
        raise MismatchError(
            f"version {version}: {1 - mismatch['mismatch/share_equal']:.3%} of the log-probabilities differ between "
            f"learner and sampler, by up to {mismatch['mismatch/max_abs']:.3g} nats, where the plan promises equal bits"
        )
    return {"guard/version": 1, "guard/mismatch": 1}


@contextmanager
def incidents(record: Record, learner: Learner, step: int) -> Iterator[None]:
    """A check that fails inside leaves a line in incidents.jsonl on its way up."""
    version = learner.version
    try:
        yield
    except SyncError as error:
        record.incident(
            Incident(
                step=step,
                version=version,
                check="sync",
                condition=error.condition,
                tensors=error.tensors,
                expected=f"version {learner.version} live in the sampler, whole and proved",
                found=str(error),
                likely_cause="see the condition in the contract of a synchronization",
                action="the run stopped; the version before keeps serving",
            )
        )
        raise
    except MismatchError as error:
        record.incident(
            Incident(
                step=step,
                version=version,
                check="mismatch",
                condition="C6",
                tensors=(),
                expected="the same bits on both sides",
                found=str(error),
                likely_cause="an order of sums, a weight or an activation that the two sides do not share",
                action="the run stopped before the update",
            )
        )
        raise
    except NonFiniteError as error:
        record.incident(
            Incident(
                step=step,
                version=version,
                check="finite",
                condition="C6",
                tensors=(),
                expected="finite numbers",
                found=str(error),
                likely_cause="weights or gradients that overflowed, or a learning rate that is too high",
                action="the run stopped before the update",
            )
        )
        raise
