"""The page of an incident: what a tired engineer needs to know, on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from onegrid.guard.verdict import Verdict, shorten

CONDITIONS = {
    "C1": "precision set: every tensor is live in the format that the plan gives it",
    "C2": "grid: codes and scales are the learner's own, byte for byte",
    "C3": "derived state: whatever is computed from weights was computed from the new ones",
    "C4": "storage: the update is in the storage that serves",
    "C5": "completeness: every tensor arrived, whole and once",
    "C6": "health: what is computed is finite and as close to the learner as this pairing is known to be",
    "C7": "freshness: nothing made with older weights counts as new",
}
ADVICE = {
    "audit": "compare `onegrid plan` with the sampler's own list of exclusions; names are compared whole",
    "digest": "send the version again; if the same tensors differ, look at the sampler's loader and its rounding",
    "transaction": "look at the transport; buckets may come in any size and order, each byte once",
    "storage": "look at what serves beside the weights; the line above says which part",
    "probe": "look at what is outside the digest: captured graphs, tied copies, tables, the cache's format",
    "selfcheck": "look at the layout that the kernel reads, and at the quantizer of its inputs",
    "bytes": "the learner is not consistent with itself: resume from the last checkpoint",
    "freshness": "look at the version counter, caches and requests in flight",
    "sentinel": "run the checks of the synchronization again at this version, then replay the batch in the learner",
}


def page(verdicts: Sequence[Verdict], *, version: int, serving: int | None, action: str) -> str:
    """Text of the checks that did not pass.

    serving  version that goes on serving, None where nothing does
    action   what the run did
    """
    lines = [f"version {version} was refused: {len(verdicts)} of the checks did not pass"]
    for v in verdicts:
        lines += ["", f"{v.check}: {v.status}. {v.condition}, {CONDITIONS.get(v.condition, '')}"]
        if v.tensors:
            lines.append(f"  tensors   {shorten(v.tensors)}")
        lines += [f"  expected  {v.expected}", f"  found     {v.found}"]
        lines += [f"  where     {place}" for place in v.where[:4]]
        if v.cause:
            lines.append(f"  cause     {v.cause}")
        if v.check in ADVICE:
            lines.append(f"  do        {ADVICE[v.check]}")
    serves = "nothing serves until a version is proved" if serving is None else f"version {serving} keeps serving"
    return "\n".join([*lines, "", f"{action}; {serves}"])
