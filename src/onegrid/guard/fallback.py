"""The last policy: tensors that cannot be kept on one grid are kept in BF16 on both sides, and the record says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from onegrid.errors import CapabilityError, RecipeError
from onegrid.learner.learner import Learner
from onegrid.recipe import Plan
from onegrid.recipe.exactness import notes_of, reasons_of
from onegrid.recipe.kinds import fused_group
from onegrid.sampler.base import Sampler

RULE = "fallback after an incident"


def with_bf16(plan: Plan, names: Iterable[str]) -> Plan:
    """`plan` with these tensors, and all that engines keep in one operand with them, in BF16 on both sides.

    Raises RecipeError for a name that the plan does not have, or where none of them was quantized.
    """
    wanted = {name for name in names if plan[name].weight or plan[name].sampler_weight}
    groups = {group for name in wanted if (group := fused_group(name))}
    wanted |= {name for name in plan.tensors if fused_group(name) in groups}
    if not wanted:
        raise RecipeError(f"none of {sorted(names)} is quantized; BF16 would change nothing")
    tensors = {
        name: dataclasses.replace(
            t,
            weight=None,
            activation=None,
            gradient=None,
            backward=None,
            sampler_weight=None,
            sampler_activation=None,
            amax_group=None,
            rule=RULE,
        )
        if name in wanted
        else t
        for name, t in plan.tensors.items()
    }
    reasons = reasons_of(tensors.values(), kv_cache=plan.kv_cache, learner_kv=plan.learner_kv)
    return dataclasses.replace(
        plan, tensors=tensors, exact=not reasons, reasons=reasons, notes=notes_of(tensors.values())
    )


def fall_back(learner: Learner, sampler: Sampler, names: Iterable[str]) -> list[str]:
    """Both sides go over to BF16 for `names`; nothing serves until the next synchronization. Returns what has changed.

    Raises CapabilityError where the sampler cannot change its plan while it runs, RecipeError as `with_bf16`.
    """
    adopt = getattr(sampler, "adopt", None)
    if adopt is None:
        raise CapabilityError("this sampler cannot change its plan while it runs; the policy bf16 is not for it")
    plan = with_bf16(learner.plan, names)
    changed = [name for name, t in plan.tensors.items() if t != learner.plan[name]]
    learner.adopt(plan)
    adopt(plan)
    return changed
