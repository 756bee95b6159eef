"""How faults get into a live pairing: methods of its own objects are wrapped, and act from one version on.

Nothing is simulated: the loop, the learner, the transaction and the engine are those of a run, and only what the fault
is about is changed. A fault leaves a refused version alone, so that the version before can be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from onegrid.errors import CapabilityError
from onegrid.learner.learner import Learner
from onegrid.model.canonical import raw_bytes
from onegrid.model.live import LiveWeights
from onegrid.model.stacks import is_stack
from onegrid.sampler.engine import Engine
from onegrid.sampler.intake import Intake


@dataclass
class Bench:
    """The pairing that a fault goes into."""

    learner: Learner
    sampler: Engine
    at: int
    """First version that the fault touches."""
    touched: set[str] = field(default_factory=set)
    """Canonical names that the fault has changed; what a check should name."""
    happened: int = 0
    """How often it has really changed something."""

    @property
    def armed(self) -> bool:
        """Whether the fault acts now."""
        return self.learner.version >= self.at and not self.intake.refused

    @property
    def intake(self) -> Intake:
        """The sampler's side of a transaction."""
        return self.sampler.intake

    @property
    def weights(self) -> LiveWeights:
        """The sampler's live weights."""
        return self.sampler.weights

    def touch(self, names: Iterable[str]) -> None:
        """Notes that these tensors were changed."""
        self.touched.update(names)
        self.happened += 1


def needs_operands(bench: Bench) -> None:
    """CapabilityError where the sampler derives nothing that is kept: such a fault then has no place to act."""
    if not bench.weights.keeps_operands:
        raise CapabilityError(
            'no place for this fault: with sampler.weights = "codes" no operand is kept that could differ from its '
            "codes; faults of codes and scales act there too"
        )


def wrap(thing: Any, method: str, around: Callable[..., Any]) -> None:
    """Replaces a method of one object by `around(original, *arguments)`."""
    original = getattr(thing, method)

    def replaced(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(thing, method, replaced)


def after_load(bench: Bench, act: Callable[[], None]) -> None:
    """`act` changes canonical bytes of an armed version when they have arrived and were proved, before operands."""

    def derive(original: Callable[..., None], *arguments: Any) -> None:
        if bench.armed:
            act()
        original(*arguments)

    wrap(bench.weights, "derive", derive)


def after_derive(bench: Bench, act: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
    """`act` changes what was derived of an armed version; `otherwise` runs after every other derivation."""

    def derive(original: Callable[..., None], *arguments: Any) -> None:
        original(*arguments)
        if bench.armed:
            act()
        elif otherwise is not None:
            otherwise()

    wrap(bench.weights, "derive", derive)


def captured_anew(bench: Bench) -> None:
    """Drops captured steps: those of before do not have the fault, or still have it."""
    if bench.sampler.graphs is not None:
        bench.sampler.graphs.reset()


def serve(bench: Bench, change: Callable[[Any], Any], otherwise: Callable[[], None] | None = None) -> None:
    """What serves an armed version is `change(model)`, in captured steps too; `otherwise` runs before any other."""
    acts = False

    def serving(original: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        nonlocal acts
        cache, model = original()
        if acts != bench.armed:
            acts = bench.armed
            captured_anew(bench)
        if not acts and otherwise is not None:
            otherwise()
        return cache, change(model) if acts else model

    wrap(bench.sampler, "_serving", serving)


def moved(bench: Bench, part: str = "codes", names: Iterable[str] | None = None) -> list[str]:
    """Tensors of which `part` differs from the version before, in forward order."""
    names = bench.weights.names() if names is None else names
    return [n for n in names if part in bench.weights.parts(n) and bool(changed(bench, n, part).any())]


def changed(bench: Bench, name: str, part: str) -> Tensor:
    """Which bytes of a part have moved since the version before, flat."""
    live, old = bench.weights.parts(name)[part], bench.intake.old(name)[part]
    return raw_bytes(live.contiguous()) != raw_bytes(old.contiguous())


def last_expert(names: Iterable[str]) -> str:
    """The last tensor of the last expert, or the last one of all."""
    names = list(names)
    experts = [n for n in names if is_stack(n)]
    return (experts or names)[-1]


def change_byte(bench: Bench, name: str, part: str, change: Callable[[int], int]) -> None:
    """Changes the first byte of a part that has moved, or its first."""
    places = changed(bench, name, part).nonzero()
    raw = raw_bytes(bench.weights.parts(name)[part])
    at = int(places[0, 0]) if len(places) else 0
    raw[at] = change(int(raw[at])) & 0xFF
    bench.touch([name])


def put_back(bench: Bench, names: Iterable[str], parts: Iterable[str] | None = None) -> None:
    """The bytes of the version before, under the new version's number."""
    for name in names:
        for part, live in bench.weights.parts(name).items():
            if parts is None or part in parts:
                live.copy_(bench.intake.old(name)[part])
    bench.touch(names)


def exchange(one: Tensor, other: Tensor) -> None:
    """Swaps the content of two tensors in place."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
