"""One rule of a recipe, and the one language in which rules name tensors.

A pattern is a dotted name. `*` stands for exactly one component, `**` for any number of them, also none; anything else
stands for itself, whole. It is compared from the first component on; a leading `model.` may be left out. A pattern
that names a module covers the tensors inside. So `layers.*.mlp.gate` is every router and no `gate_proj`, `lm_head` is
not `mtp.lm_head`, and `layers.1` is not layer 10.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache

from onegrid.errors import RecipeError
from onegrid.recipe.kinds import KINDS, LINEAR_KINDS, layer_of

BACKWARDS = ("quantized", "high_precision", "dequantized")
SAME = "same"
"""Value of `sampler_weight` and `sampler_activation`: as the learner."""

_RANGE = re.compile(r"(first|last) (\d+(?:\.\d+)?)( ?%)?")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What the tensors of matching linears become. First match wins."""

    match: str = "**"
    """Dotted name with `*` for one component and `**` for any number, such as "layers.*.mlp.**"."""
    kinds: tuple[str, ...] = ()
    """Only tensors of these kinds (KINDS in recipe/kinds.py, or "linear" for all decoder linears); empty for all."""
    layers: tuple[str, ...] = ()
    """Only main layers in one of these ranges: "3", "0-2", "first 1", "last 2", "last 15%" (rounded up)."""
    weight: str | None
    """Quantizer of the weight. None keeps BF16. No default: a recipe says what it means."""
    activation: str | None
    """Quantizer of the input. None keeps BF16."""
    gradient: str | None = None
    """Quantizer of the incoming gradient in a quantized backward; None there means that of the activation."""
    backward: str | None = None
    """"quantized", "high_precision" or "dequantized"; needed where the weight is quantized."""
    sampler_weight: str | None = SAME
    """The sampler's own quantizer of the weight: "same", a name, or None for BF16."""
    sampler_activation: str | None = SAME
    """The sampler's own quantizer of the input. A BF16 weight of the sampler takes BF16 inputs."""
    optional: bool = False
    """A rule that matches nothing is an error unless this is set."""
    opt_in: bool = False
    """Lets the rule decide guarded kinds too (lm_head, embedding, router, ...), which stay BF16 otherwise."""

    def __post_init__(self) -> None:
        _pattern(self.match)
        for kind in self.kinds:
            known = ("linear", *KINDS)
            if kind not in known:
                raise RecipeError(f"{self}: unknown kind {kind!r}{nearest(kind, known)}; kinds: {', '.join(known)}")
        for layers in self.layers:
            layer_range(layers, 100)
        if self.backward is not None and self.backward not in BACKWARDS:
            close = nearest(self.backward, BACKWARDS)
            raise RecipeError(f"{self}: backward {self.backward!r}{close} is not one of {', '.join(BACKWARDS)}")
        if self.weight is None and (self.activation or self.gradient or self.backward):
            raise RecipeError(f"{self}: activation, gradient and backward need a quantized weight; this one is BF16")

    def __str__(self) -> str:
        """What selects its tensors, as plans and messages name it."""
        parts = [self.match] if self.match != "**" or not (self.kinds or self.layers) else []
        parts += [f"kinds {', '.join(self.kinds)}"] if self.kinds else []
        parts += [f"layers {', '.join(self.layers)}"] if self.layers else []
        return "; ".join(parts)

    def matches(self, name: str, kind: str, num_layers: int) -> bool:
        """Whether the canonical name is among the rule's tensors. Layer ranges count main layers only."""
        if self.kinds and kind not in self.kinds and not ("linear" in self.kinds and kind in LINEAR_KINDS):
            return False
        if self.layers:
            layer = layer_of(name)
            if layer is None or layer >= num_layers or kind == "extra":
                return False
            if not any(layer in layer_range(text, num_layers) for text in self.layers):
                return False
        return matches(self.match, name)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern covers a dotted name. RecipeError for a pattern outside the language."""
    return _pattern(pattern).fullmatch(name + ".") is not None


def layer_range(text: str, num_layers: int) -> range:
    """The layers that a range means in a model of num_layers main layers.

    "3", "0-2" (both ends in), "first N", "last N", "first P%", "last P%"; a percentage rounds up, so that it is
    never nothing. RecipeError for anything else.
    """
    found = _RANGE.fullmatch(text.strip())
    if found:
        side, number, percent = found.groups()
        count = math.ceil(num_layers * float(number) / 100 - 1e-9) if percent else int(float(number))
        count = min(count, num_layers)
        if percent or "." not in number:
            return range(count) if side == "first" else range(num_layers - count, num_layers)
    span = _SPAN.fullmatch(text.strip())
    if span:
        first, last = int(span.group(1)), int(span.group(2) or span.group(1))
        if first <= last:
            return range(first, last + 1)
    raise RecipeError(f'layer range {text!r} is not one of "3", "0-2", "first 1", "last 2", "last 15%"')


def nearest(word: str, known: Iterable[str]) -> str:
    """What to add to a message about an unknown word: the nearest known one, or nothing if none is close."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest_names(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names most like a pattern that matched none: those that share most components, then most letters.

    Layer and expert numbers are written as `*`, so that one layer stands for all.
    """
    wanted = set(pattern.split(".")) - {"*", "**"}
    shown = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)

    def likeness(name: str) -> tuple[int, float]:
        return len(wanted & set(name.split("."))), SequenceMatcher(None, pattern, name).ratio()

    return sorted(shown, key=likeness, reverse=True)[:count]


@lru_cache(maxsize=4096)
def _pattern(text: str) -> re.Pattern[str]:
    if text.startswith("re:"):
        raise RecipeError(
            f"pattern {text!r} is a regular expression; patterns here are dotted names with `*` for one component "
            f"and `**` for any number, such as 'vision_tower.**'"
        )
    pieces: Sequence[str] = text.split(".")
    if not text or not all(pieces):
        raise RecipeError(f"pattern {text!r} has an empty component; write a dotted name such as 'layers.*.mlp.**'")
    for piece in pieces:
        if piece not in ("*", "**") and not re.fullmatch(r"[\w-]+", piece):
            raise RecipeError(
                f"pattern {text!r}: {piece!r} is neither a whole name nor `*` nor `**`; a star stands for whole "
                f"components only (write 'layers.*.mlp.gate_proj', not 'layers.*.mlp.gate*')"
            )
    tokens = {"*": r"[^.]+\.", "**": r"(?:[^.]+\.)*"}
    body = "".join(tokens.get(piece, re.escape(piece) + r"\.") for piece in pieces)
    return re.compile(rf"(?:model\.)?{body}(?:[^.]+\.)*")
