"""Byte comparison on the learner (C2): what its forward reads is what it publishes, and that is its own masters' grid.

Three links, every tensor. Masters to codes: there was no update, and torch has not written to a master, since its
codes were made, and the codes have the digest that they were made with. Codes to operands: the operands are the bytes
that the sampler derived from its own copy of the codes, and torch has written to them since their codes moved, so that
the two sides did not both forget. Operands to linears: every linear reads these operands, with
the backward mode of the plan.
Where something is not as it should be, codes are quantized and operands derived again, and compared byte for byte.
What none of it sees, a making that does not repeat or a master that changed by itself, is found in turns: with n
storage keys, m a synchronization are made again whatever their digests say, each within ceil(n / m) synchronizations.
With adapters there is a link before the first: masters are base + s B A. A row of every tensor is held against that at
every synchronization, another row each time, and masters whose turn it is are merged again whole, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from onegrid.errors import SyncError
from onegrid.guard.causes import NOT_MERGED
from onegrid.guard.locate import first_difference
from onegrid.guard.turns import due
from onegrid.guard.verdict import Verdict, closed, failed, passed, shorten
from onegrid.learner.grid_linear import Site
from onegrid.learner.learner import Learner
from onegrid.model.canonical import parts_of, raw_bytes
from onegrid.model.derived import canonical_parts, in_doubt, sums_of
from onegrid.model.publish import publish
from onegrid.model.stacks import is_stack
from onegrid.ops.native import transposed

CHECK, CONDITION = "bytes", "C2"


@torch.no_grad()
def compare_bytes(
    learner: Learner,
    *,
    doubted: Iterable[str] | None = None,
    per_sync: int = 1,
    writes: dict[str, tuple[int, int]] | None = None,
) -> Verdict:
    """Masters to codes to operands to linears, every tensor.

    doubted   keys whose operands the sampler does not hold in the same bytes; None: nobody compared
    per_sync  keys that are made again in any case
    writes    of the last call that passed, by key: the digest of the codes and torch's count of writes to the operand;
              gets those of this call if it passes. None or empty: nothing is known
    """
    return closed(CHECK, CONDITION, lambda: _compare(learner, doubted, per_sync, {} if writes is None else writes))


def _compare(
    learner: Learner, doubted: Iterable[str] | None, per_sync: int, writes: dict[str, tuple[int, int]]
) -> Verdict:
    live, plan = learner.live, learner.plan
    canonical = dict(zip(live.held, sums_of([canonical_parts(x) for x in live.held.values()]), strict=True))
    turn = due(list(learner.masters), version=learner.version, per_sync=per_sync)
    now = {key: (canonical[key], o.values._version) for key, o in live.operands.items()}
    forgotten = _not_written(now, writes)
    apart = _not_merged(learner, turn)
    if apart:
        return failed(
            CHECK,
            CONDITION,
            tensors=apart,
            expected="masters that are the base and its adapters, merged at this version",
            found=f"others in {shorten(apart)}",
            cause=NOT_MERGED,
        )
    unclear = [
        key
        for key, master in learner.masters.items()
        if learner.written.get(key) != (learner.num_updates, master._version, canonical[key])
    ]
    wrong, where = _requantized(learner, [*unclear, *turn])
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
        live.verify(None if doubted is None else dict.fromkeys([*doubted, *forgotten, *turn]))
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
    strangers = [key for key, site in sites.items() if site.rowwise is not live.operands.get(key)]
    if strangers:
        return failed(
            CHECK,
            CONDITION,
            tensors=[name for key in strangers for name in learner.keys[key]],
            expected="linears that read the operands of the published codes",
            found=f"linears with operands of their own: {shorten(strangers)}",
            cause="a copy of the weights that the learner's forward keeps",
        )
    turned = stale_transposes(sites, [*forgotten, *turn])
    if turned:
        return failed(
            CHECK,
            CONDITION,
            tensors=[name for key in turned for name in learner.keys[key]],
            expected="transposes, which dgrad reads, of the published codes",
            found=f"others of {shorten(turned)}",
            cause="a transpose of a native operand that was not made again with its version",
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
    writes.clear()  # not before: what was refused once must be looked at again when it is sent again
    writes.update(now)
    return passed(CHECK, CONDITION)


def _not_written(now: Mapping[str, tuple[int, int]], before: Mapping[str, tuple[int, int]]) -> list[str]:
    """Keys whose codes have moved since the last pass and whose operand nobody has written to."""
    return [
        key
        for key, (made, count) in now.items()
        if key in before and before[key][0] != made and before[key][1] == count
    ]


def stale_transposes(sites: Mapping[str, Site], keys: Iterable[str]) -> list[str]:
    """Those of `keys` whose kept transpose is not that of the published operand, byte for byte."""
    held = {key: kept for key in keys if key in sites and (kept := sites[key].transposed) is not None}
    return in_doubt(held, {key: transposed(sites[key].published()) for key in held})


def _not_merged(learner: Learner, turn: Iterable[str]) -> list[str]:
    """Tensors whose master is not base + s B A: all in one row, those of `turn` whole."""
    adapters = learner.adapters
    if adapters is None:
        return []
    excess = {key: adapters.row_excess(key, learner.version).tolist() for key in adapters.names}
    wrong = {name for key, each in excess.items() for name, x in zip(learner.keys[key], each, strict=True) if x > 1.0}
    for key in turn:
        if key not in adapters.names:
            continue
        have, want = learner.masters[key].detach(), adapters.merged(key)
        for index, name in enumerate(learner.keys[key]):
            pair = (have[index], want[index]) if is_stack(key) else (have, want)
            if not torch.equal(*(raw_bytes(x.contiguous()) for x in pair)):
                wrong.add(name)
    return [name for key in adapters.names for name in learner.keys[key] if name in wrong]


def _requantized(learner: Learner, keys: Iterable[str]) -> tuple[list[str], list[str]]:
    """Names whose codes are not those of a second quantization of `keys`, and where they differ first."""
    keys = _with_partners(learner, set(keys))
    values = {key: m.detach().to(torch.bfloat16) for key, m in learner.masters.items() if key in keys}
    differing: dict[str, str] = {}
    made = publish(values, learner.keys, learner.plan, side="learner", by_definition=True)  # by another way than theirs
    for key, again in made.items():
        parts, held = parts_of(again), parts_of(learner.live.held[key])
        if all(torch.equal(raw_bytes(held[part]), raw_bytes(x.contiguous())) for part, x in parts.items()):
            continue
        for index, name in enumerate(learner.keys[key]):
            expected = {part: x[index] if is_stack(key) else x for part, x in parts.items()}
            found = first_difference(learner.live.canonical(name), expected, learner.live.parts(name))
            if found is not None:
                differing[name] = f"{name}: {found}"
    return list(differing), list(differing.values())


def _with_partners(learner: Learner, keys: set[str]) -> set[str]:
    """`keys`, and those that share a global amax with them."""
    groups = {key: {learner.plan[name].amax_group for name in names} - {None} for key, names in learner.keys.items()}
    shared = {group for key in keys for group in groups[key]}
    return keys | {key for key, mine in groups.items() if mine & shared}
