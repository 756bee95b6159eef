"""Byte comparison on the learner (C2): what its forward reads is what it publishes, and that is its own masters' grid.

Three links: the codes equal a second quantization of the masters, the operands equal a second derivation from those
codes, and every linear reads those operands, with the backward mode of the plan.
"""

from __future__ import annotations

import torch

from onegrid.errors import SyncError
from onegrid.guard.locate import first_difference
from onegrid.guard.verdict import Verdict, closed, failed, passed, shorten
from onegrid.learner.learner import Learner
from onegrid.model.canonical import parts_of, raw_bytes
from onegrid.model.publish import publish
from onegrid.model.stacks import is_stack

CHECK, CONDITION = "bytes", "C2"


@torch.no_grad()
def compare_bytes(learner: Learner) -> Verdict:
    """Masters to codes to operands to linears, every tensor, byte for byte."""
    return closed(CHECK, CONDITION, lambda: _compare(learner))


def _compare(learner: Learner) -> Verdict:
    live, plan = learner.live, learner.plan
    wrong: list[str] = []
    where: list[str] = []
    values = {key: master.detach().to(torch.bfloat16) for key, master in learner.masters.items()}
    for key, again in publish(values, learner.keys, plan, side="learner").items():
        parts, held = parts_of(again), parts_of(live.held[key])
        if all(torch.equal(raw_bytes(held[part]), raw_bytes(x.contiguous())) for part, x in parts.items()):
            continue
        for index, name in enumerate(learner.keys[key]):
            expected = {part: x[index] if is_stack(key) else x for part, x in parts.items()}
            found = first_difference(live.canonical(name), expected, live.parts(name))
            if found is not None:
                wrong.append(name)
                where.append(f"{name}: {found}")
    if wrong:
        return failed(
            CHECK,
            CONDITION,
            tensors=wrong,
            expected="codes that are the quantization of the learner's masters",
            found=f"other bytes in {shorten(wrong)}",
            where=where[:8],
            cause="the learner's forward reads and publishes codes that do not follow from its masters: an update "
            "after which it did not quantize, or memory that was overwritten",
        )
    try:
        live.verify()
    except SyncError as error:
        return failed(
            CHECK,
            CONDITION,
            tensors=error.tensors,
            expected="operands that follow from the published codes",
            found=str(error),
            cause="the learner's forward reads operands that are not those of the codes it publishes",
        )
    sites = learner.grad_weights.sites
    strangers = [key for key, site in sites.items() if site.rowwise is not live.operands[key]]
    if strangers:
        return failed(
            CHECK,
            CONDITION,
            tensors=[name for key in strangers for name in learner.keys[key]],
            expected="linears that read the operands of the published codes",
            found=f"linears with operands of their own: {shorten(strangers)}",
            cause="a copy of the weights that the learner's forward keeps",
        )
    modes = {key: plan[learner.keys[key][0]].backward or "high_precision" for key in sites}
    ignored = [key for key, site in sites.items() if site.backward != modes[key] or set(site.calls) - {modes[key]}]
    if ignored:
        return failed(
            CHECK,
            CONDITION,
            tensors=[name for key in ignored for name in learner.keys[key]],
            expected=f"backward {modes[ignored[0]]!r}, as the plan says",
            found=f"backward {sites[ignored[0]].backward!r}, ran {sorted(sites[ignored[0]].calls)}",
            cause="a backward mode that was asked for and is not the one that runs",
        )
    return passed(CHECK, CONDITION)
