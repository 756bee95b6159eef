"""All checks of one synchronization, in one place, and what a failure does.

The order is that of evidence: is the learner consistent with itself, did the bytes arrive, is every tensor in its
format, does the storage hold them, do kernels compute with them, does the whole give the learner's answer, is nothing
old left. All checks are asked even where one has failed, so that the page shows the whole picture; then the commit is
undone, and the version before goes on serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from onegrid.errors import CapabilityError, ConfigError, RecipeError, SyncError
from onegrid.guard import (
    audit,
    byte_comparison,
    digests,
    freshness,
    health,
    layers,
    probe,
    selfcheck,
    sentinel,
    storage,
)
from onegrid.guard.config import GuardConfig
from onegrid.guard.fallback import fall_back
from onegrid.guard.incident import page
from onegrid.guard.verdict import FailedChecks, Verdict, failed
from onegrid.guard.watch import Watch, locate
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot
from onegrid.sampler.base import Sampler, engine_of
from onegrid.sync import SyncReport, push
from onegrid.types import Batch, Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardReport:
    """A synchronization that is proved."""

    sync: SyncReport
    verdicts: tuple[Verdict, ...]
    failures: tuple[Verdict, ...] = ()
    """What had failed before the policy of the configuration helped."""
    action: str = ""
    """What was done about it."""

    def metrics(self) -> dict[str, float]:
        """Keys `guard/<check>`."""
        metrics: dict[str, float] = {f"guard/{v.check}": v.metric for v in self.verdicts}
        return metrics | {"guard/transaction": 1}


@dataclass
class Guard:
    """What the checks of one run remember between synchronizations."""

    config: GuardConfig
    watch: Watch
    answers: list[Tensor] | None = None
    """Of the probe at the version before."""
    manifest: Manifest | None = None
    """Of the version before."""
    probed: tuple[int, Verdict] | None = None
    """Version and verdict of the last probe."""
    doubted: bool = False
    """Whether the synchronization before was refused."""
    writes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """See `byte_comparison.compare_bytes`."""
    bf16: list[str] = field(default_factory=list)
    """Tensors that fell back to BF16."""
    observe: Callable[[list[Verdict]], None] | None = None
    """Gets every list of verdicts, and nothing is stopped: for the fault campaign only."""
    seen: list[Verdict] = field(default_factory=list)
    """Verdicts of the last synchronization that was tried."""

    @property
    def sentinel(self) -> sentinel.Sentinel:
        """What is expected of the pairing."""
        return self.watch.sentinel

    def runs(self, check: str) -> bool:
        """Whether the configuration leaves a check on."""
        return check not in self.config.off

    def objections(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Those that stop a version."""
        lenient = self.config.unknown == "record"
        return [v for v in verdicts if not v.passed and not (lenient and v.status == "could not tell")]


def guard_of(config: GuardConfig, learner: Learner, sampler: Sampler, *, model: str | None = None) -> Guard:
    """A guard for one pairing.

    model  name of the checkpoint that is trained, which a calibration must be of; None: any
    Raises ConfigError for a calibration that does not belong to it, or where the pairing is not exact, has none, and
    the configuration does not say what to do without.
    """
    expectation = None
    if config.calibration:
        expectation = sentinel.load_expectation(
            Path(config.calibration),
            plan_digest=learner.plan.digest,
            engine=engine_of(sampler),
            model=model,
        )
    exact = learner.plan.exact and sampler.capabilities.bits
    known = exact or expectation or config.replay_every
    if not (known or config.unknown == "record" or "sentinel" in config.off):
        because = "; ".join(learner.plan.reasons) or "the sampler promises no bits"
        raise ConfigError(
            f"nothing is known of the mismatch that this pairing should have, which is not exact: {because}. Set "
            'guard.replay_every, give a file as guard.calibration, say guard.unknown = "record", or leave the check '
            'out: guard.off = ["sentinel"]'
        )
    if config.traces and not layers.can_trace(sampler):
        raise ConfigError("guard.traces: this sampler does not show what its layers give; the embedded engine does")
    watch = Watch(
        sentinel.Sentinel(exact=exact, expectation=expectation),
        sampler,
        every=config.replay_every,
        num=config.replay_sequences,
        band=config.replay_band,
        traces=config.traces,
    )
    return Guard(config, watch)


def guard_sync(learner: Learner, sampler: Sampler, guard: Guard) -> GuardReport:
    """The learner's version into the sampler, with every check, or the version before keeps serving.

    Raises FailedChecks, a SyncError, with the page of the incident.
    """
    try:
        return _attempt(learner, sampler, guard)
    except FailedChecks as error:
        if guard.config.on_failure == "stop":
            raise
        first = error
    try:
        report = _attempt(learner, sampler, guard)
        return _helped(report, first, f"version {learner.version} was sent again, and passed")
    except FailedChecks as error:
        if guard.config.on_failure == "resend":
            error.add_note("this was the second time that it was sent")
            raise error.after(first) from first
        second = error
    try:
        names = keep_in_bf16(learner, sampler, guard, [name for v in second.verdicts for name in v.tensors])
    except (RecipeError, CapabilityError) as error:
        second.add_note(f"BF16 does not help: {error}")
        raise second from error
    report = _attempt(learner, sampler, guard)
    return _helped(report, second, f"{len(names)} tensors are BF16 from here on: {', '.join(names)}")


def keep_in_bf16(learner: Learner, sampler: Sampler, guard: Guard, names: Iterable[str]) -> list[str]:
    """See `fallback.fall_back`; the guard remembers it, for a checkpoint."""
    changed = fall_back(learner, sampler, dict.fromkeys(names))
    guard.bf16 += changed
    guard.sentinel.exact = learner.plan.exact and sampler.capabilities.bits
    guard.sentinel.expectation = None  # it was measured with another plan
    guard.answers = guard.manifest = None
    guard.writes.clear()
    return changed


def check_step(
    guard: Guard, mismatch: dict[str, float], batch: Batch, *, learner: Learner, logp: Sequence[Tensor]
) -> list[Verdict]:
    """The checks of a step, before its update: versions of tokens, and the mismatch. Raises FailedChecks.

    logp  FP32 [R] per sequence, of the learner, at the version that sampled the batch
    """
    version = learner.version
    verdicts: list[Verdict] = []
    if guard.runs("freshness"):
        verdicts.append(freshness.fresh_tokens(batch, version=version))
    if guard.runs("sentinel"):
        verdicts.append(guard.watch.judge(mismatch, batch, learner, logp))
    if guard.observe is not None:
        guard.observe(verdicts)
        return verdicts
    wrong = [v for v in guard.objections(verdicts) if mismatch or v.check != "sentinel"]  # no tokens: nothing to judge
    if wrong:
        text = page(wrong, version=version, serving=version, action=_BEFORE_UPDATE)
        raise FailedChecks(text, wrong)
    return verdicts


def check_health(guard: Guard, metrics: Mapping[str, float], *, learner: Learner) -> list[Verdict]:
    """The sentinel's other half, before the update: see `health.within_limits`. Raises FailedChecks."""
    if not guard.runs("sentinel"):
        return []
    verdict = health.within_limits(metrics, guard.config.limits, vocab_size=learner.spec.vocab_size)
    if guard.observe is not None:
        guard.observe([verdict])
    elif not verdict.passed:
        text = page([verdict], version=learner.version, serving=learner.version, action=_BEFORE_UPDATE)
        raise FailedChecks(text, [verdict])
    return [verdict]


_BEFORE_UPDATE = "the run stopped before the update"


def _helped(report: GuardReport, error: FailedChecks, action: str) -> GuardReport:
    return GuardReport(sync=report.sync, verdicts=report.verdicts, failures=error.verdicts, action=action)


def _attempt(learner: Learner, sampler: Sampler, guard: Guard) -> GuardReport:
    snapshot = Snapshot(version=learner.version, plan_digest=learner.plan.digest, tensors=learner.canonical())
    guard.doubted = any(not v.passed for v in guard.seen)
    verdicts: list[Verdict] = []
    guard.seen = verdicts
    answers: list[Tensor] = []

    def prove(manifest: Manifest, sampler: Sampler) -> None:
        verdicts.extend(_examine(manifest, snapshot, learner, sampler, guard, answers))
        if guard.observe is not None:
            guard.observe(verdicts)
            return
        wrong = guard.objections(verdicts)
        if wrong:
            raise FailedChecks(wrong[0].found, wrong)

    try:
        report = push(snapshot, sampler, bucket_bytes=guard.config.bucket_bytes, prove=prove)
    except FailedChecks as error:
        raise _refusal(list(error.verdicts), learner, sampler) from error
    except SyncError as error:
        verdict = _refused(error, snapshot, sampler, guard)
        verdicts.append(verdict)
        raise _refusal([verdict], learner, sampler) from error
    guard.answers, guard.manifest = answers or None, report.manifest
    return GuardReport(sync=report, verdicts=tuple(verdicts))


def _examine(
    manifest: Manifest, snapshot: Snapshot, learner: Learner, sampler: Sampler, guard: Guard, answers: list[Tensor]
) -> list[Verdict]:
    """Every check of a commit that can still be undone."""
    out: list[Verdict] = []
    before, per_sync = guard.manifest, guard.config.linears_per_sync
    doubted = None
    if guard.runs("bytes") or guard.runs("digest"):
        doubted = digests.doubts(learner, sampler)
    if guard.runs("bytes"):
        out.append(byte_comparison.compare_bytes(learner, doubted=doubted, per_sync=per_sync, writes=guard.writes))
    if guard.runs("audit"):
        out.append(audit.audit(learner.plan, sampler))
    if guard.runs("digest"):
        out.append(
            digests.compare_digests(
                manifest,
                sampler,
                snapshot,
                previous=before,
                doubted=doubted,
                per_sync=per_sync,
            )
        )
    if guard.runs("storage") and storage.can_see(sampler):
        out.append(storage.compare_storage(learner, sampler))
    if guard.runs("selfcheck"):
        out.append(selfcheck.selfcheck(learner.plan, sampler, snapshot, per_sync=per_sync))
    if guard.runs("probe") and _probe_is_due(sampler, guard, manifest.version):
        verdict, new = probe.probe(
            learner,
            sampler,
            snapshot,
            probe.probe_prompts(learner.spec.vocab_size),
            previous=guard.answers,
            changed=before is not None and before.entries != manifest.entries,
            band=guard.config.probe_band,
            eager=_is_turn(guard, manifest.version) or not sampler.capabilities.bits,
        )
        if verdict.status == "failed" and sampler.capabilities.bits and layers.can_trace(sampler):
            prompts = probe.probe_prompts(learner.spec.vocab_size)
            verdict = locate(verdict, learner, sampler, probe.training(prompts))
        answers += new
        guard.probed = (manifest.version, verdict)
    if guard.runs("probe") and guard.probed is not None:
        at, verdict = guard.probed
        rested = "" if at == manifest.version else f"not its turn; at version {at}: "
        out.append(replace(verdict, found=rested + verdict.found))
        if guard.runs("storage") and not storage.can_see(sampler):
            out.append(replace(verdict, check="storage", found=f"by the probe alone: {verdict.found}"))
    if guard.runs("freshness"):
        last = None if before is None else before.version
        out.append(freshness.fresh_sampler(sampler, version=manifest.version, before=last))
    return out


def _probe_is_due(sampler: Sampler, guard: Guard, version: int) -> bool:
    """Every time for most; see `GuardConfig.probe_every`. By version, so that a resumed run does what it would have."""
    can = sampler.capabilities
    rests = can.bits and not can.captured and storage.can_see(sampler) and guard.runs("storage")
    return not rests or _is_turn(guard, version)


def _is_turn(guard: Guard, version: int) -> bool:
    """Whether the probe looks at everything: in turns, at the start, and after a refusal."""
    return guard.manifest is None or guard.doubted or version % guard.config.probe_every == 0


def _refused(error: SyncError, snapshot: Snapshot, sampler: Sampler, guard: Guard) -> Verdict:
    """The verdict on what the transaction itself refused."""
    if error.condition == "C2" and error.tensors:
        return digests.differing(error.tensors, sampler, snapshot, previous=guard.manifest)
    return failed(
        "transaction",
        error.condition,
        tensors=error.tensors,
        expected=f"version {snapshot.version}, every tensor whole and once, in the plan's format",
        found=str(error),
        cause=_CAUSES.get(error.condition, ""),
    )


def _refusal(verdicts: list[Verdict], learner: Learner, sampler: Sampler) -> FailedChecks:
    try:
        serving = sampler.version
    except CapabilityError:
        serving = None
    text = page(verdicts, version=learner.version, serving=serving, action="the synchronization was undone")
    return FailedChecks(text, verdicts)


_CAUSES = {
    "C1": "a sampler that was built with another plan, or keeps a layer in a format of its own",
    "C5": "a bucket that was lost, repeated or cut, or a sender that was interrupted",
    "C7": "a version counter that began anew, as after a resume that did not restore it",
}
