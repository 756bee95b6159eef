"""Freshness (C7): nothing made with older weights is used or reported as the new version.

Every token carries the version that made it, cached prompts belong to the version that serves, and versions grow by
one from synchronization to synchronization, across resumes too.
"""

from __future__ import annotations

import torch

from onegrid.guard.verdict import Verdict, closed, could_not_tell, failed, passed
from onegrid.sampler.base import Sampler
from onegrid.types import Batch

CHECK, CONDITION = "freshness", "C7"


def fresh_sampler(sampler: Sampler, *, version: int, before: int | None) -> Verdict:
    """After a commit: the version that serves, and those of its caches.

    version  that of the learner
    before   that of the last synchronization this run has seen, None for its first
    """
    return closed(CHECK, CONDITION, lambda: _sampler(sampler, version, before))


def _sampler(sampler: Sampler, version: int, before: int | None) -> Verdict:
    if sampler.version != version:
        return failed(
            CHECK, CONDITION, expected=f"version {version} serving", found=f"version {sampler.version}", cause=_LOST
        )
    if before is not None and version <= before:
        found = f"version {version} after version {before}"
        return failed(CHECK, CONDITION, expected="versions that grow", found=found, cause=_RESET)
    ask = getattr(sampler, "cached_versions", None)
    if ask is None:
        found = "it has no cached_versions()"
        return could_not_tell(CHECK, CONDITION, expected="the versions of the sampler's caches", found=found)
    cached = ask()
    if not isinstance(cached, set | frozenset | list | tuple) or not all(type(v) is int for v in cached):
        return could_not_tell(CHECK, CONDITION, expected="integers, the versions of caches", found=repr(cached)[:80])
    old = sorted(set(cached) - {version})
    if old:
        found = f"prompts of versions {old} in its cache"
        return failed(CHECK, CONDITION, expected=f"cached prompts of version {version} only", found=found, cause=_CACHE)
    return passed(CHECK, CONDITION)


def fresh_tokens(batch: Batch, *, version: int) -> Verdict:
    """Before an update: every token of the batch was made by the learner's own version."""
    labels = [s.version_R for s in batch.sequences]
    if not sum(len(v) for v in labels) or any(v.is_floating_point() or v.dtype == torch.bool for v in labels):
        found = ", ".join(sorted({str(v.dtype) for v in labels if len(v)})) or "no tokens"
        return could_not_tell(CHECK, CONDITION, expected=f"tokens of version {version}", found=found)
    others = {int(v) for s in batch.sequences for v in s.version_R.unique()} - {version}
    unlabelled = sum(len(s.version_R) != len(s.sampler_logp_R) for s in batch.sequences)
    if others or unlabelled:
        found = f"the learner has version {version}, but tokens came from {sorted(others)}"
        found += f"; {unlabelled} sequences do not say it for every token" if unlabelled else ""
        return failed(CHECK, CONDITION, expected=f"tokens of version {version}", found=found, cause=_LOST)
    return passed(CHECK, CONDITION)


_LOST = "an update that was reported and did not happen, or completions that were in flight across it"
_RESET = "a version counter that began anew, as after a resume that did not restore it"
_CACHE = "a prefix cache that outlives a synchronization"
