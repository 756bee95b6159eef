"""Canonical bytes of the version that an engine serves, in a file of shared memory, and what the engine makes of them.

Adapter and worker map the same file, in one process or in two, so a weight crosses by address and never as a pickle.
`sampler.intake.Intake` runs its transactions over this store as over that of the embedded engine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import SyncError, WeightsError
from onegrid.formats import QUANTIZERS, QuantTensor, quantize
from onegrid.model.canonical import Canonical, dtype_name, parts_of
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.recipe import Plan

ALIGN = 256
Ask = Callable[..., Any]
"""Calls a method of the worker by name and returns its answer."""


class SharedStore:
    """Follows `sampler.intake.Store`.

    spec, plan  whose tensors, in the formats of the sampler's side
    ask         set by the adapter when its engine runs
    """

    def __init__(self, spec: ModelSpec, plan: Plan) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="onegrid-", dir=_shared_memory()))
        self._clean = weakref.finalize(self, shutil.rmtree, str(self.folder), ignore_errors=True)
        self.templates = {name: template(plan, name, shape) for name, shape in tensor_shapes(spec).items()}
        self.table, total = table_of(self.templates)
        (self.folder / "table.json").write_text(json.dumps(self.table), encoding="utf-8")
        self._bytes = map_file(self.folder / "canonical", total, create=True)
        self.tensors = tensors_of(self._bytes, self.table, self.templates)
        self.ask: Ask | None = None

    def names(self) -> list[str]:
        """Every canonical name, in forward order."""
        return list(self.tensors)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Canonical storage by part, as views of the shared file. WeightsError for a name that is not there."""
        if name not in self.tensors:
            raise WeightsError(f"no tensor {name!r} in this model")
        return parts_of(self.tensors[name])

    def canonical(self, name: str) -> Canonical:
        """The tensor as views of the shared file."""
        return self.tensors[name]

    def derive(self) -> None:
        """Takes the bytes into the engine, through its own reload functions, in place."""
        self._ask("onegrid_load")

    def verify(self) -> None:
        """SyncError where what the engine's kernels read does not follow from these bytes; C3, or C4 for addresses."""
        faults = self._ask("onegrid_verify")
        if faults:
            names = tuple(dict.fromkeys(name for name, _, _ in faults))
            told = "; ".join(f"{name}: {what}" for name, _, what in faults[:6])
            more = f" and {len(faults) - 6} more" if len(faults) > 6 else ""
            condition = "C3" if any(c == "C3" for _, c, _ in faults) else faults[0][1]
            raise SyncError(
                f"the engine does not hold what it was given: {told}{more}", condition=condition, tensors=names
            )

    def close(self) -> None:
        """Removes the file. The store is of no use afterwards."""
        self._clean()

    def _ask(self, method: str) -> Any:
        assert self.ask is not None, "the adapter sets it"
        return self.ask(method)


def template(plan: Plan, name: str, shape: tuple[int, ...]) -> Canonical:
    """A zero tensor of the sampler's format, for shapes and dtypes of its parts."""
    return _zeros(plan[name].sampler_weight, tuple(shape))


@functools.lru_cache(maxsize=64)
def _zeros(quantizer: str | None, shape: tuple[int, ...]) -> Canonical:
    """Not to be written to: a model has many tensors and few shapes, and quantizing a large one takes long on a CPU."""
    zeros = torch.zeros(shape, dtype=torch.bfloat16)
    return zeros if quantizer is None else quantize(zeros, QUANTIZERS[quantizer])


def table_of(templates: Mapping[str, Canonical]) -> tuple[dict[str, dict[str, Any]], int]:
    """Name -> {"format", "shape", "parts": part -> (dtype, shape, offset)}, as JSON can hold it; bytes in all."""
    table: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, canonical in templates.items():
        parts = {}
        for part, x in parts_of(canonical).items():
            parts[part] = [dtype_name(x), list(x.shape), offset]
            offset += -(-x.nbytes // ALIGN) * ALIGN
        fmt = None if isinstance(canonical, Tensor) else canonical.quantizer.name
        table[name] = {"format": fmt, "shape": list(canonical.shape), "parts": parts}
    return table, max(offset, ALIGN)


def tensors_of(
    data: Tensor, table: Mapping[str, Mapping[str, Any]], templates: Mapping[str, Canonical] | None = None
) -> dict[str, Canonical]:
    """Canonical tensors as views of a mapped file."""
    found: dict[str, Canonical] = {}
    for name, entry in table.items():
        views = {}
        for part, (dtype, shape, offset) in entry["parts"].items():
            kind = getattr(torch, dtype)
            count = int(torch.Size(shape).numel()) * kind.itemsize
            views[part] = data[offset : offset + count].view(kind).view(shape)
        if entry["format"] is None:
            found[name] = views["values"]
            continue
        known = _zeros(entry["format"], tuple(entry["shape"])) if templates is None else templates[name]
        assert isinstance(known, QuantTensor)
        found[name] = dataclasses.replace(
            known, codes=views["codes"], scales=views["scales"], amax=views.get("amax"), factor=None
        )
    return found


def map_file(path: Path, num_bytes: int, *, create: bool = False) -> Tensor:
    """uint8 [num_bytes] that shares its memory with everyone who maps the file."""
    if create:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.truncate(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def _shared_memory() -> str | None:
    """Linux keeps it as a folder; elsewhere the ordinary place for temporary files will do."""
    place = "/dev/shm"
    return place if os.path.isdir(place) and os.access(place, os.W_OK) else None
