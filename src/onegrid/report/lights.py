"""Every check of a run as a row of lights, one a step, or one for some steps where there are many."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onegrid.report.reading import Run

MAX_LIGHTS = 128
ORDER = ("bytes", "audit", "transaction", "digest", "selfcheck", "probe", "freshness", "sentinel")
"""As a synchronization asks them; checks that are not among them follow by name."""

STATES = {1: "passed", 0: "failed", -1: "could not tell"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Light:
    """The worst of one check in some steps."""

    state: str
    """"passed", "failed", "could not tell" or "absent"."""
    text: str
    """For a person who points at it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One check."""

    check: str
    lights: tuple[Light, ...]
    counts: dict[str, int]
    """Steps by state."""
    off: bool
    """Whether the configuration switched it off."""

    @property
    def summary(self) -> str:
        """In words, for those who do not see lights."""
        if self.off:
            return "switched off by the configuration"
        said = [f"{count:,} {state}" for state, count in self.counts.items() if count]
        return ", ".join(said) or "no result"


def rows(run: Run) -> list[Row]:
    """One row for each check that left a result, an incident, or is switched off."""
    results: dict[str, dict[int, int]] = {}
    for line in run.steps:
        for key, value in line.items():
            if key.startswith("guard/") and value in (1, 0, -1):
                results.setdefault(key.removeprefix("guard/"), {})[line["step"]] = int(value)
    for incident in run.incidents:
        check, step = str(incident.get("check", "unnamed")), incident.get("step")
        if isinstance(step, int):
            by_step = results.setdefault(check, {})
            by_step[step] = min(by_step.get(step, 0), 0)
    off = [str(name) for name in run.table("guard").get("off") or []]
    names = sorted({*results, *off}, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    steps = sorted({line["step"] for line in run.steps} | {step for found in results.values() for step in found})
    return [_row(name, results.get(name, {}), steps, off=name in off) for name in names]


def _row(check: str, found: dict[int, int], steps: list[int], *, off: bool) -> Row:
    size = max(1, math.ceil(len(steps) / MAX_LIGHTS))
    lights = []
    for begin in range(0, len(steps), size):
        some = steps[begin : begin + size]
        values = [found[step] for step in some if step in found]
        state = "absent" if not values else STATES[0 if 0 in values else min(values)]
        which = f"step {some[0]}" if len(some) == 1 else f"steps {some[0]} to {some[-1]}"
        lights.append(Light(state=state, text=f"{check}, {which}: {state}"))
    counts = {state: sum(value == wanted for value in found.values()) for wanted, state in STATES.items()}
    return Row(check=check, lights=tuple(lights), counts=counts, off=off)
