"""What a fault is: how it gets in, what it breaks, and which checks see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onegrid.guard.injection import Bench

AUDIT, DIGEST, STORAGE, SELF, PROBE = "audit", "digest", "storage", "selfcheck", "probe"
FRESH, SENTINEL, BYTES, TRANSACTION, WAKE = "freshness", "sentinel", "bytes", "transaction", "wake"
FINITE = "finite"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way to go wrong."""

    name: str
    condition: str
    """What it breaks."""
    what: str
    inject: Callable[[Bench], None]
    fires: tuple[str, ...]
    """Checks that must object, in the order of the guard; empty for a change that is no fault."""
    reported: tuple[str, ...] = ()
    """Conditions under which a check may report it; empty for `condition` alone."""
    cause: str = ""
    """The cause that the check that names it rightly must give; empty where any will do."""
    names: bool = True
    """Whether it concerns canonical tensors, which a check must then name exactly."""
    model: str = "moe"
    """Model of the bench: "moe", "tied" with a head that is the embedding, or "adapted" with adapters."""
    preset: str = "mxfp8"
    published: str = ""
    """Its number in the published table."""


def row(name: str, condition: str, what: str, inject: Callable[[Bench], None], *fires: str, **more) -> Fault:
    """A fault, with `fires` as the rest of the positional arguments."""
    return Fault(name=name, condition=condition, what=what, inject=inject, fires=fires, **more)


WEIGHTS = (DIGEST, SELF, PROBE, SENTINEL)
"""What sees other weights of a linear in the sampler."""
