"""What a pairing that is not exact is known to differ by: measured at fixed weights, with audit and digest green."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onegrid.guard.audit import audit
from onegrid.guard.digests import compare_digests
from onegrid.guard.sentinel import Expectation, calibrate
from onegrid.guard.verdict import FailedChecks, Verdict
from onegrid.learner.learner import Learner
from onegrid.mismatch.metrics import compare
from onegrid.rl.batch import group_rollouts, make_requests, pack
from onegrid.rl.draw import step_seed
from onegrid.rl.loop import snapshot
from onegrid.rl.tasks import Task
from onegrid.sampler.base import Sampler, engine_of
from onegrid.sync import manifest_of, push
from onegrid.types import Batch, Manifest, Sampling


def batches(
    task: Task, sampler: Sampler, *, samples: int, seed: int, sampling: Sampling, first: int = 1
) -> Iterator[Batch]:
    """The batches of steps `first`, `first` + 1 and so on, all by the sampler's present version; advantages are 0."""
    step = first
    while True:
        requests = make_requests(task.prompts(step, 0), samples, seed=step_seed(seed, step), sampling=sampling)
        rollouts = sampler.generate(requests)
        yield pack(group_rollouts(rollouts), [0.0] * len(rollouts), truncated="keep", temperature=sampling.temperature)
        step += 1


def measure(
    learner: Learner, sampler: Sampler, drawn: Iterator[Batch], num_steps: int, *, model: str,
    on_step: Callable[[int], None] = lambda step: None,
) -> Expectation:  # fmt: skip
    """Mean and deviation of the mismatch over `num_steps` batches of the learner's weights as they are.

    Raises FailedChecks where audit or digest objects: what is wrong must not become what is expected.
    """
    held = snapshot(learner)

    def prove(manifest: Manifest, sampler: Sampler) -> None:
        verdicts: list[Verdict] = [audit(learner.plan, sampler), compare_digests(manifest, sampler, held)]
        wrong = [v for v in verdicts if not v.passed]
        if wrong:
            raise FailedChecks(f"no calibration of a pairing that is not in order: {wrong[0].found}", wrong)

    if sampler.version == learner.version:
        prove(manifest_of(held), sampler)
    else:
        push(held, sampler, prove=prove)
    lines = []
    for step in range(num_steps):
        batch = next(drawn)
        sequences = batch.sequences
        logp = learner.log_probs(batch)
        lines.append(compare(logp, [s.sampler_logp_R for s in sequences], [s.mask_R for s in sequences]))
        on_step(step + 1)
    return calibrate(lines, model=model, plan_digest=learner.plan.digest, engine=engine_of(sampler))
