"""Triton kernels of a step that begin before the one before them has ended, see `ops.capture.early_launches`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onegrid.ops.capture import may_begin_early


@triton.jit
def begin(EARLY: tl.constexpr):
    """First in a kernel that is launched with `options`."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


def options(device: torch.device) -> dict[str, Any]:
    """What such a kernel is launched with, beside its own arguments."""
    return {"EARLY": True, "launch_pdl": True} if may_begin_early(device) else {"EARLY": False}
