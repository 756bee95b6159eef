"""Storage check (C4, C3, C1): what would make the next token reads what the other checks are about.

Digests are taken of the storage that was loaded. Here it is asked whether a call reads that storage (operands, and
codes and scales where kernels read these) and no other, under the learner's own position tables, head and cache format:
state that belongs to no tensor of the plan. It costs next to nothing, sees only what it knows to look for, and says
which; the probe sees the rest, without a name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onegrid.guard.causes import HEAD, OLD_ADDRESSES, OTHER_CACHE, TABLES
from onegrid.guard.verdict import Verdict, closed, could_not_tell, failed, passed, shorten
from onegrid.learner.learner import Learner
from onegrid.model.canonical import raw_bytes
from onegrid.ops.logprob import logits
from onegrid.sampler.base import Sampler
from onegrid.sampler.serving import Serving

CHECK, CONDITION = "storage", "C4"


def can_see(sampler: Sampler) -> bool:
    """Whether a sampler shows what it reads; one that does not is probed at every synchronization."""
    return hasattr(sampler, "reads")


@torch.no_grad()
def compare_storage(learner: Learner, sampler: Sampler) -> Verdict:
    """Addresses, tables, head and cache format of a sampler that `can_see`."""
    return closed(CHECK, CONDITION, lambda: _compare(learner, sampler.reads()))  # type: ignore[attr-defined]


def _compare(learner: Learner, serving: Serving) -> Verdict:
    silent = [key for key in learner.keys if not serving.proved.get(key)]
    if silent or len(serving.proved) != len(learner.keys):
        found = f"addresses of {len(serving.proved)}" + (f", none of {shorten(silent)}" if silent else "")
        return could_not_tell(CHECK, CONDITION, expected=f"addresses of {len(learner.keys)} weights", found=found)
    moved = [key for key, where in serving.read.items() if serving.proved.get(key) != where]
    if moved or serving.read.keys() != serving.proved.keys():
        names = [name for key in moved for name in learner.keys[key]]
        return failed(
            CHECK,
            CONDITION,
            tensors=names,
            expected="calls that read the storage that was updated and proved",
            found=f"other storage for {len(moved)} of {len(serving.proved)} weights: {shorten(names)}",
            cause=OLD_ADDRESSES,
        )
    wanted = learner.plan.kv_cache
    if serving.kv_cache != wanted:
        found = f"keys and values in {serving.kv_cache}"
        return failed(CHECK, "C1", expected=f"keys and values in {wanted}", found=found, cause=OTHER_CACHE)
    lengths = [len(table) for table in serving.tables]
    if len(lengths) != 2 or lengths[0] != lengths[1] or not lengths[0]:
        found = f"tables of {lengths} positions"
        return could_not_tell(CHECK, "C3", expected="one cos and one sin for every position", found=found)
    learner.reach(lengths[0])
    for name, mine, theirs in zip(("cos", "sin"), learner.rope, serving.tables, strict=True):
        rows = len(theirs)
        differing = (raw_bytes(mine[:rows]) != raw_bytes(theirs[:rows].contiguous().to(mine.device))).view(rows, -1)
        if bool(differing.any()):
            first = int(differing.any(-1).nonzero()[0, 0])
            return failed(
                CHECK,
                "C3",
                expected="the learner's table of positions, byte for byte",
                found=f"another {name} from position {first} on, in {int(differing.any(-1).sum())} of {rows} rows",
                cause=TABLES,
            )
    hidden_ND = _hidden(serving.head_VD)
    if not torch.equal(serving.logits(hidden_ND), logits(hidden_ND, serving.head_VD)):
        return failed(
            CHECK,
            "C3",
            expected="logits from the head that was updated and proved",
            found="logits of another head",
            cause=HEAD,
        )
    return passed(CHECK, CONDITION)


def _hidden(head_VD: Tensor) -> Tensor:
    """BF16 [1, D], the same every time."""
    width = head_VD.shape[1]
    return ((torch.arange(width, device=head_VD.device) % 7 - 3) / 4).to(torch.bfloat16)[None]
