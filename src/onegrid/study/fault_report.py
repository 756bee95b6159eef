"""The campaign as rows for a machine and as a page for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onegrid.guard.config import CHECKS
from onegrid.guard.faults import FAULTS
from onegrid.rl.record import versions
from onegrid.study.campaign import Outcome
from onegrid.study.corruptions import Tally
from onegrid.study.kills import Kills

PUBLISHED = {
    "F1": ("caught", "missed", "missed", "fires"),
    "F2": ("missed (28 of 28 agree)", "caught (56 of 311)", "missed", "silent (KL .007-.010)"),
    "F3": ("missed", "no query", "caught", "fires (KL 7.2)"),
    "F4": ("missed (2 of 2)", "missed (69 of 69)", "caught (1.739 against .25)", "silent (KL .047, 4 steps)"),
}
"""Rules, engine, self-check, sentinel, as the paper on MXFP8 in verl has them."""
COLUMNS = ("transaction", "wake", "finite", *CHECKS)


def rows(outcomes: Sequence[Outcome], corruptions: Tally | None, healthy: Tally | None) -> list[dict[str, Any]]:
    """One object a fault: fault, condition, caught_by, at, named_right, seconds, and what else is known."""
    out: list[dict[str, Any]] = [
        {
            "fault": o.fault,
            "condition": o.condition,
            "caught_by": o.caught_by,
            "at": o.at,
            "named_right": o.named_right,
            "seconds": o.seconds,
            "device": o.device,
            "weights": o.weights,
            "what": FAULTS[o.fault].what,
            "is_fault": bool(FAULTS[o.fault].fires),
            "as_claimed": o.as_claimed,
            "safe": o.safe,
            "fires": list(o.fires),
            "unguarded": o.unguarded,
            "unguarded_stopped_by": o.stopped_by,
            "where": [place for v in o.verdicts for place in v.where][:1],
            "cause": next((v.cause for v in o.verdicts if v.cause), ""),
        }
        for o in outcomes
    ]
    if corruptions is not None:
        out += [row | {"is_fault": True} for row in corruptions.rows]
    if healthy is not None:
        out.append(
            {
                "fault": "none",
                "condition": "",
                "caught_by": ", ".join(healthy.missed),
                "at": f"{healthy.num} syncs",
                "named_right": healthy.alarms == 0,
                "seconds": healthy.seconds,
                "device": healthy.device,
                "weights": healthy.weights,
                "what": "healthy synchronizations; caught_by lists the false alarms",
                "is_fault": False,
            }
        )
    return out


def problems(
    outcomes: Sequence[Outcome], corruptions: Tally | None, healthy: Tally | None, kills: Kills | None = None
) -> list[str]:
    """What did not go as it should, one line each; empty where all is well."""
    out = []
    for o in outcomes:
        if not o.as_claimed:
            want = FAULTS[o.fault].fires
            out.append(f"{o.fault}: {list(o.fires)} objected, {list(want)} should; changed {o.changed} times")
        if not o.named_right:
            out.append(f"{o.fault}: the condition or the tensors were not named right")
        if not o.safe:
            out.append(f"{o.fault}: after the refusal the sampler does not serve the version before, whole")
    if corruptions is not None:
        out += [f"random corruption {missed}: not caught" for missed in corruptions.missed]
        wrong = corruptions.alarms - corruptions.named_right
        out += [f"{wrong} random corruptions were named wrongly"] if wrong else []
        out += [f"{corruptions.unsafe} refusals left something else serving"] if corruptions.unsafe else []
    if healthy is not None:
        out += [f"false alarm {alarm}" for alarm in healthy.missed]
    if kills is not None:
        out += [f"{run}: other bytes after the resume" for run in kills.different]
    return out


def markdown(
    command: str,
    outcomes: Sequence[Outcome],
    corruptions: Tally | None,
    healthy: Tally | None,
    kills: Kills | None = None,
    absent: Sequence[str] = (),
) -> str:
    """The page. Clock readings are those of the machine that ran the command. absent  faults that had no place"""
    faults = [o for o in outcomes if FAULTS[o.fault].fires]
    caught = sum(bool(o.caught_by) for o in faults)
    named = sum(o.named_right for o in faults)
    where = _where([*outcomes, corruptions, healthy])
    lines = [
        "# Faults, and the checks that see them",
        "",
        f"Written by `{command}` with {_software()}. {where} "
        "Every fault is injected into the real loop of a small mixture of experts "
        "(two layers, four experts, an update that moves every weight in every step) and acts from the third "
        "synchronization on, on bytes that moved since the version before. A smaller campaign of some minutes: "
        "`onegrid faults --campaign quick --page docs/faults.md`; `--work FOLDER` keeps what is done, and goes on.",
        "",
        f"* {caught} of {len(faults)} faults were caught, {named} of them named rightly (condition, and exactly the "
        "tensors where it concerns tensors); after every refusal the version before was serving, whole, or nothing.",
    ]
    if absent:
        lines.append(f"* {len(absent)} faults of operands have no place where none is kept: {', '.join(absent)}.")
    if corruptions is not None:
        by = ", ".join(f"{check} {count}" for check, count in corruptions.by_check.most_common())
        lines.append(
            f"* {corruptions.alarms} of {corruptions.num} corruptions drawn by seed {corruptions.seed} were caught "
            f"({by}), {corruptions.named_right} named exactly."
        )
    if healthy is not None:
        lines.append(f"* {healthy.alarms} false alarms in {healthy.num} healthy synchronizations.")
    if kills is not None:
        lines.append(
            f"* {kills.same} of {kills.num} runs that were killed (`kill -9`) at a random moment of a synchronization "
            "and resumed ended in the metrics and weights of an uninterrupted run, with every check passed."
        )
    lines += ["", "## Caught by what, when", "", *_table(_CAUGHT_HEAD, [_caught(o) for o in outcomes])]
    lines += [
        "",
        "`with all checks off` is the first step that sampled with the fault, about 30 tokens: k3 (an "
        "estimator of KL that is never negative) and the largest difference of a log-probability between learner and "
        "sampler. A healthy step has 0 in both.",
        "",
        "## Which checks see which fault",
        "",
        "All checks asked, none obeyed. The self-check takes every linear and the probe is asked every time here; in "
        "a run they take turns (`guard.linears_per_sync`, `guard.probe_every`).",
        *(_WIDE if any(o.wide for o in outcomes) else ()),
        "",
        *_table(("fault", *COLUMNS), [_seen(o) for o in outcomes]),
    ]
    published = [o for o in outcomes if FAULTS[o.fault].published in PUBLISHED]
    lines += [
        "",
        "## Beside the published table",
        "",
        *_table(
            ("fault", "", "rules", "engine", "self-check", "sentinel"),
            [row for o in published for row in _beside(o)],
        ),
        "",
        "The sentinel sees all four here because this pairing is exact: its expectation is 0. Where an engine promises "
        "no bits, a difference inside its calibrated band stays unseen by the sentinel; the audit names F1 and F2, the "
        "digest F3 and F4.",
        "",
    ]
    return "\n".join(lines)


_WIDE = (
    "",
    "This model is wide enough for kernels of packed weights. A row is right where every check of bytes, names, "
    "addresses and versions sees what it sees in the narrow model; self-check, probe and sentinel look at numbers, in "
    "which one code among so many may show or not.",
)


def _software() -> str:
    found = versions()
    gpu = f", CUDA {found['cuda']}" if found["gpu"] != "none" else ""
    return f"torch {found['torch']}{gpu}, {found['platform']}, CPU with {found['cpu']}, {found['threads']} threads"


def _where(parts: Sequence[Outcome | Tally | None]) -> str:
    """What every row of a page ran on."""
    found = dict.fromkeys((x.device, x.weights) for x in parts if x is not None)
    return " ".join(f'Every row ran on {device} with `sampler.weights = "{kind}"`.' for device, kind in found)


def _beside(o: Outcome) -> list[tuple[str, ...]]:
    """Two lines: what was published, and what objects here. Rules are one plan here; the engine is asked and read."""
    number = FAULTS[o.fault].published
    engine = [check for check in ("audit", "digest", "storage") if check in o.fires]
    ours = (
        "one plan for both sides",
        f"caught ({', '.join(engine)})" if engine else "missed",
        "caught" if "selfcheck" in o.fires else "missed",
        "fires" if "sentinel" in o.fires else "silent",
    )
    return [(f"{number} {o.fault}", "published", *PUBLISHED[number]), ("", "here", *ours)]


_CAUGHT_HEAD = ("fault", "what", "breaks", "caught by", "at", "ms", "named", "with all checks off")


def _caught(o: Outcome) -> tuple[str, ...]:
    fault = FAULTS[o.fault]
    name = f"{o.fault} ({fault.published})" if fault.published else o.fault
    if not fault.fires:
        return name, fault.what, "-", "nothing, rightly" if not o.caught_by else o.caught_by, o.at, "", "", _off(o)
    milliseconds = f"{1000 * o.seconds:.0f}"
    named = "yes" if o.named_right else "no"
    return name, fault.what, o.condition, o.caught_by or "nothing", o.at, milliseconds, named, _off(o)


def _off(o: Outcome) -> str:
    if o.stopped_by:
        return f"stops: {o.stopped_by.partition(':')[0]}"
    if "mismatch/k3" not in o.unguarded:
        return "-"
    return f"k3 {o.unguarded['mismatch/k3']:.2g}, max {o.unguarded['mismatch/max_abs']:.2g}"


def _seen(o: Outcome) -> tuple[str, ...]:
    return o.fault, *("x" if check in o.fires else "" for check in COLUMNS)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(row)} |" for row in body]
