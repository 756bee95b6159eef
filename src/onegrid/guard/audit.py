"""Plan audit (C1): every tensor of the model, once, in the format that the plan gives it, from the live modules.

The sampler is asked what it runs, not what it was configured to run; a list of rules that agrees with the plan says
nothing about a layer that was never built from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from onegrid.guard.verdict import Verdict, closed, could_not_tell, failed, passed, shorten
from onegrid.recipe import Plan
from onegrid.sampler.base import Live, Sampler

CHECK, CONDITION = "audit", "C1"


def audit(plan: Plan, sampler: Sampler) -> Verdict:
    """Planned against live: name, shape, format of the weight and, where the sampler can say it, of its input."""
    return closed(CHECK, CONDITION, lambda: _compare(plan, sampler.describe()))


def _compare(plan: Plan, live: Mapping[str, Live]) -> Verdict:
    if not isinstance(live, Mapping) or not live:
        return could_not_tell(CHECK, CONDITION, expected=f"{len(plan.tensors)} tensors", found=f"{live!r}")
    missing = [name for name in plan.tensors if name not in live]
    extra = [name for name in live if name not in plan.tensors]
    wrong: dict[str, str] = {}
    for name, planned in plan.tensors.items():
        if name not in live:
            continue
        inputs = live[name].activation
        expected = _words(planned.shape, planned.sampler_weight or "bf16", planned.sampler_activation)
        found = _words(live[name].shape, live[name].format, planned.sampler_activation if inputs is None else inputs)
        if expected != found:
            wrong[name] = f"{name}: planned {expected}, live {found}"
    if not (missing or extra or wrong):
        return passed(CHECK, CONDITION, found=f"{len(live)} tensors as planned")
    told = [f"{len(wrong)} of {len(plan.tensors)} are not as planned"] if wrong else []
    told += [f"not in the sampler: {shorten(missing)}"] if missing else []
    told += [f"not in the plan: {shorten(extra)}"] if extra else []
    return failed(
        CHECK,
        CONDITION,
        tensors=[*wrong, *missing, *extra],
        expected=f"{len(plan.tensors)} tensors as the plan says",
        found="; ".join(told),
        where=list(wrong.values())[:8],
        cause=_cause(plan, live, wrong),
    )


def _words(shape: tuple[int, ...], weight: str, activation: str | None) -> str:
    inputs = "" if activation in (None, "bf16") else f", inputs {activation}"
    return f"{weight or 'no format'} {tuple(shape)}{inputs}"


def _cause(plan: Plan, live: Mapping[str, Live], wrong: Mapping[str, str]) -> str:
    left = [n for n in wrong if live[n].format == "bf16" and plan[n].sampler_weight]
    taken = [n for n in wrong if live[n].format != "bf16" and plan[n].sampler_weight is None]
    if left:
        return "layers that the sampler left in BF16: an exclusion that is read as a part of a name"
    if taken:
        return f"tensors that the sampler quantizes on its own ({taken[0]}): an exclusion that it does not know"
    return "another format on the sampler's side: its own rule for this layer" if wrong else "another model"
