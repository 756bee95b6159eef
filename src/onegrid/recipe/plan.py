"""The resolved answer for every tensor of one model: what learner, sampler, synchronization and checks all read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onegrid.errors import RecipeError

_IDENTITY = (
    "name",
    "shape",
    "weight",
    "activation",
    "gradient",
    "backward",
    "sampler_weight",
    "sampler_activation",
    "amax_group",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """What one tensor becomes. Quantizers by name; None is BF16."""

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    kind: str
    """One of onegrid.recipe.kinds.KINDS."""
    weight: str | None
    activation: str | None
    """Quantizer of the linear's input, along its last axis."""
    gradient: str | None
    """Quantizer of the incoming gradient; None unless the backward is "quantized"."""
    backward: str | None
    """"quantized", "high_precision" or "dequantized"; None where the weight is BF16."""
    sampler_weight: str | None
    sampler_activation: str | None
    amax_group: str | None
    """Quantized weights with the same group share one amax, where their format has one. None: its own."""
    rule: str
    """The rule that decided."""

    @property
    def mixed(self) -> bool:
        """Whether the sampler uses other quantizers than the learner."""
        return (self.weight, self.activation) != (self.sampler_weight, self.sampler_activation)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe resolved for one model. Made by `onegrid.recipe.resolve`, never by hand."""

    recipe_name: str
    tensors: dict[str, TensorPlan]
    """Canonical name -> answer, every tensor once, in the order of the index."""
    kv_cache: str
    learner_kv: str
    reference: str
    """Precision of the reference policy: "bf16" or "plan"."""
    exact: bool
    """Whether learner and sampler log-probabilities are promised to be the same bits in the embedded engine."""
    reasons: tuple[str, ...]
    """Why not exact; empty when it is."""
    notes: tuple[str, ...]
    """What cannot be independent of the micro-batch split, and other facts that change no promise of the pairing."""
    matmul: str = "grid"
    """Products of quantized dense linears: "grid" or "native"; see `Recipe.matmul`."""

    @property
    def mixed(self) -> bool:
        """Whether any tensor's quantizers differ between learner and sampler."""
        return any(t.mixed for t in self.tensors.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides a number of the policy: two plans with one digest compute the same.

        Over canonical JSON (sorted keys, no spaces) of the tensors' names, shapes and quantizers and of the key/value
        settings. Names of recipe and rules, kinds, reasons, notes and the reference's precision are left out.
        """
        decided: dict[str, Any] = {
            "tensors": [{key: getattr(t, key) for key in _IDENTITY} for _, t in sorted(self.tensors.items())],
            "kv_cache": self.kv_cache,
            "learner_kv": self.learner_kv,
        }
        if self.matmul != "grid":
            decided["matmul"] = self.matmul
        return hashlib.sha256(json.dumps(decided, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __getitem__(self, name: str) -> TensorPlan:
        if name not in self.tensors:
            from onegrid.recipe.rule import nearest_names

            raise RecipeError(f"the plan has no tensor {name!r}; nearest: {nearest_names(name, self.tensors)}")
        return self.tensors[name]

    def to(self, dialect: str) -> dict[str, Any]:
        """The plan as others must be told it: "vllm", "sglang", "te", "hf", "modelopt", "compressed-tensors".

        Raises RecipeError for a plan that the dialect cannot say; see `onegrid.recipe.dialects.export`.
        """
        from onegrid.recipe.dialects.export import export

        return export(self, dialect)

    def to_json(self) -> str:
        """The plan as JSON text, with its digest."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tensors"}
        names = [f.name for f in dataclasses.fields(TensorPlan)]
        tensors = [{name: getattr(t, name) for name in names} for t in self.tensors.values()]
        return json.dumps({**fields, "mixed": self.mixed, "digest": self.digest, "tensors": tensors}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. RecipeError if it is not one, or if its digest does not fit its content."""
        try:
            data = json.loads(text)
            digest, _ = data.pop("digest"), data.pop("mixed")
            tensors = [TensorPlan(**{**t, "shape": tuple(t["shape"])}) for t in data.pop("tensors")]
            data |= {key: tuple(data[key]) for key in ("reasons", "notes")}
            plan = cls(**data, tensors={t.name: t for t in tensors})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RecipeError(f"not a plan: {error!r}; a plan is written by Plan.to_json") from error
        if plan.digest != digest:
            raise RecipeError(f"the plan was changed after it was written: digest {plan.digest}, recorded {digest}")
        return plan

    def table(self, *, full: bool = False) -> str:
        """Text with a row for all tensors that differ in layer and expert number alone; `full`: one for each."""
        rows = [("tensor", "count", "shape", "weight", "activation", "backward", "sampler", "decided by")]
        for names, t in _grouped(self.tensors.values(), full=full):
            backward = t.backward if t.backward != "quantized" else f"quantized {t.gradient}"
            sampler = f"{t.sampler_weight or 'bf16'}/{t.sampler_activation or 'bf16'}" if t.mixed else "same"
            shape = "x".join(map(str, t.shape))
            formats = (t.weight or "bf16", t.activation or "bf16" if t.weight else "-", backward or "-", sampler)
            rows.append((_span(names), str(len(names)), shape, *formats, t.rule))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, "", *self.summary()])

    def summary(self) -> list[str]:
        """The lines below the table: counts, exactness with reasons, notes, digest."""
        quantized = [t for t in self.tensors.values() if t.weight]
        numbers, all_numbers = (sum(_numel(t.shape) for t in ts) for ts in (quantized, self.tensors.values()))
        share = f"{100 * numbers / all_numbers:.1f} %" if all_numbers else "0 %"
        kind = "exact" if self.exact else "not exact"
        return [
            f"recipe {self.recipe_name}: {len(quantized)} of {len(self.tensors)} tensors quantized, {share} of numbers",
            *(() if self.matmul == "grid" else (f"products of quantized dense linears: {self.matmul}",)),
            f"key/value cache {self.kv_cache}, learner's keys and values {self.learner_kv}, reference {self.reference}",
            f"pairing: {kind}{', mixed' if self.mixed else ''}",
            *(f"  because {reason}" for reason in self.reasons),
            *(f"note: {note}" for note in self.notes),
            f"digest {self.digest}",
        ]


def _grouped(tensors: Iterable[TensorPlan], *, full: bool) -> list[tuple[list[str], TensorPlan]]:
    groups: dict[object, tuple[list[str], TensorPlan]] = {}
    for t in tensors:
        alike = dataclasses.replace(t, name="" if not full else t.name, amax_group=None)
        key = (re.sub(r"\.\d+\.", ".#.", t.name), alike)
        groups.setdefault(key, ([], t))[0].append(t.name)
    return list(groups.values())


def _span(names: list[str]) -> str:
    """One name for all: numbers that vary are written as the ranges they take, such as `layers.[0-3,6].mlp`."""
    columns = list(zip(*(name.split(".") for name in names), strict=True))
    return ".".join(c[0] if len(set(c)) == 1 else f"[{_ranges({int(x) for x in c})}]" for c in columns)


def _ranges(numbers: set[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
