"""Proof that an engine holds what it was given: every canonical tensor, at its place, as the kernels read it.

Four ways, and every tensor goes at least one of them:

* plain storage is compared with the values themselves, row by row of the fused matrix;
* a layer with a layout of its own is compared, byte for byte, with a twin that the engine's code makes of the
  canonical bytes (`twin.py`);
* codes that the engine has made itself (road "online") are compared with the plan's, code by code;
* a linear whose kernel keeps its weight out of sight (oneDNN), or reads codes, is multiplied with the identity: the
  product is the weight that the kernel reads. Exact for unquantized and MX weights, since every sum has one term that
  is not zero; else within 2^-6 of the value, four roundings to 8 bits (input, scale, product, output) of 2^-8 or less.
  NVFP4 gets 6 times the identity, which its inputs hold exactly.

What belongs to no canonical tensor (tables of rotary embeddings, scales of the cache) must not change at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from onegrid.formats import digest
from onegrid.model.canonical import Canonical
from onegrid.recipe import Plan
from onegrid.sampler.vllm.config import Road
from onegrid.sampler.vllm.places import Place
from onegrid.sampler.vllm.twin import fill, process, tensors_of, twin_of
from onegrid.sampler.vllm.wire import parts_for, tensors_for, values_of

Fault = tuple[str, str, str]
"""Canonical name (or the engine's, of what has none), condition, what is wrong."""
IDENTITY_ROWS = 512
ROUNDINGS = 2.0**-6


@dataclass
class Inside:
    """A live model with what it was given. `kept` is noted at the start, `addresses` after the first load."""

    model: nn.Module
    tensors: dict[str, Canonical]
    places: dict[str, Place]
    plan: Plan
    road: Road
    dtype: torch.dtype
    device: torch.device
    kept: dict[str, int] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)

    def canonical(self, name: str) -> Canonical:
        """A tensor on the engine's device, where it is decoded."""
        x = self.tensors[name]
        if isinstance(x, Tensor):
            return x.to(self.device)
        amax = None if x.amax is None else x.amax.to(self.device)
        return replace(x, codes=x.codes.to(self.device), scales=x.scales.to(self.device), amax=amax)

    def values(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See `wire.values_of`, on the engine's device."""
        return values_of(self.canonical(name), self.dtype if dtype is None else dtype)

    def module(self, place: Place) -> nn.Module:
        """The module that holds a tensor. Experts may be one level below the name of the checkpoint."""
        found = self.model.get_submodule(place.module)
        if place.expert is None:
            return found
        for module in found.modules():
            if "w13_weight" in module._parameters or "w13_weight_packed" in module._parameters:
                return module
        raise LookupError(f"{place.module} holds no experts")

    def by_module(self) -> Iterator[tuple[nn.Module, dict[str, Place]]]:
        """Modules with the canonical tensors that they hold."""
        groups: dict[str, dict[str, Place]] = {}
        for name, place in self.places.items():
            groups.setdefault(place.module, {})[name] = place
        for places in groups.values():
            yield self.module(next(iter(places.values()))), places

    def remember(self) -> None:
        """Notes what must stay as it is from here on: buffers without canonical name, and the addresses of all."""
        self.kept = self.others()
        self.addresses = self.where()

    def others(self) -> dict[str, int]:
        """Digest of every buffer of the model."""
        return {name: digest(x) for name, x in self.model.named_buffers() if x.numel()}

    def where(self) -> dict[str, int]:
        """Address of every parameter and buffer with content."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: x.data_ptr() for name, x in named if x.numel()}


@torch.no_grad()
def verify(inside: Inside) -> list[Fault]:
    """Every fault there is; empty if the engine holds the canonical bytes."""
    faults: list[Fault] = []
    for module, places in inside.by_module():
        faults += _module(inside, module, places)
    faults += _tied_head(inside)
    for name, value in inside.others().items():
        if inside.kept.get(name, value) != value:
            faults.append((name, "C3", "a buffer that no update should touch has changed"))
    if inside.addresses:
        for name, address in inside.where().items():
            if inside.addresses.get(name, address) != address:
                faults.append((name, "C4", "moved to another address, which captured graphs do not know"))
    return faults


def is_plain(module: nn.Module) -> bool:
    """Whether a module holds weights as numbers, without codes and scales."""
    method = getattr(module, "quant_method", None)
    return method is None or type(method).__name__.startswith("Unquantized")


def _module(inside: Inside, module: nn.Module, places: dict[str, Place]) -> list[Fault]:
    names = list(places)
    if places[names[0]].expert is not None or not is_plain(module):
        faults = _as_twin(inside, module, places)
    else:
        faults = [f for name in names for f in _stored(inside, module, name, places[name])]
    if inside.road == "online" and not is_plain(module) and not faults:
        faults += _codes(inside, module, places)
    weights = {name: place for name, place in places.items() if place.leaf == "weight" and len(place.shape) == 2}
    reads_elsewhere = "cpu_linear" in module.__dict__ or not is_plain(module)
    is_linear = places[names[0]].expert is None and hasattr(module, "quant_method")
    if weights and is_linear and reads_elsewhere and not _is_embedding(module, names):
        faults += _through_kernel(inside, module, weights)
    return faults


def _stored(inside: Inside, module: nn.Module, name: str, place: Place) -> list[Fault]:
    live = module._parameters.get(place.leaf)
    if live is None:
        return [(name, "C1", f"{place.module} has no {place.leaf}")]
    if not live.numel():
        return []  # the kernel has taken the weight over; see _through_kernel
    rows = live[place.start : place.start + place.shape[0]]
    want = inside.values(name)
    if rows.shape != want.shape:
        return [(name, "C5", f"{tuple(rows.shape)} where {tuple(want.shape)} belongs")]
    wrong = int((rows.float() != want.float()).sum())
    return [(name, "C3", f"{wrong} of {want.numel()} values at {place.module} are others")] if wrong else []


def _as_twin(inside: Inside, module: nn.Module, places: dict[str, Place]) -> list[Fault]:
    """A layer against one that its own code makes of the canonical bytes."""
    twin = twin_of(module)
    faults: list[Fault] = []
    for name, place in places.items():
        if place.leaf != "weight":
            faults += _stored(inside, module, name, place)
            continue
        canonical = inside.canonical(name)
        if is_plain(module) or inside.road == "online" or isinstance(canonical, Tensor):
            parts = {"weight": next(iter(tensors_for(name, canonical, inside.plan, "online", inside.dtype).values()))}
        else:
            parts = parts_for(name, canonical, inside.plan, inside.road)
        try:
            fill(twin, place, parts)
        except (KeyError, AssertionError, RuntimeError, ValueError) as error:
            faults.append((name, "C1", f"{type(module.quant_method).__name__} does not take it: {error}"))
    if faults:
        return faults
    process(twin)
    live, want = tensors_of(module), tensors_of(twin)
    weights = [name for name, place in places.items() if place.leaf == "weight"]
    strange = sorted(path for path in live.keys() ^ want.keys() if not path.startswith(("quant_method.", "scheme.")))
    if strange:
        told = f"holds {', '.join(strange[:4])} that its twin does not, or lacks them"
        return [(name, "C3", told) for name in weights]
    for path in (path for path in live if path in want):  # what a kernel makes for itself while it runs has no twin
        read = [name for name in weights if _reads(places[name], path)]
        for name in _differing(live[path], want[path], {name: places[name] for name in read}):
            faults.append((name, "C3", f"{path} of {places[name].module} does not follow from the canonical bytes"))
    return list(dict.fromkeys(faults))


def _reads(place: Place, path: str) -> bool:
    """Whether a tensor of a layer can hold a weight: of experts, "w13" is gate and up, "w2" is down."""
    leaf = path.rpartition(".")[2]
    return not leaf.startswith("w2_" if place.shard in ("w1", "w3") else "w13_")


def _codes(inside: Inside, module: nn.Module, places: dict[str, Place]) -> list[Fault]:
    """Codes that the engine has made itself, against the plan's, where they are stored as [N, K] or [K, N] bytes.

    A layout that is not understood is a fault, since then nobody knows on which grid the engine is; except decoded
    values, which the product with the identity compares.
    """
    faults: list[Fault] = []
    for name, place in places.items():
        canonical = inside.canonical(name)
        if isinstance(canonical, Tensor):
            continue
        leaf = "weight" if place.expert is None else ("w2_weight" if place.shard == "w2" else "w13_weight")
        live = module._parameters[leaf]
        assert live is not None
        if live.element_size() > 1 and place.expert is None:
            continue
        held = live if place.expert is None else live[place.expert]
        if held.dim() != 2 or held.element_size() > 1 or place.shape[1] not in held.shape:
            faults.append((name, "C2", f"its codes are kept as {tuple(live.shape)} {live.dtype}, which cannot be read"))
            continue
        rows = held if held.shape[1] == place.shape[1] else held.T
        codes = rows[place.start : place.start + place.shape[0]].contiguous().view(torch.uint8)
        wrong = int((codes != canonical.codes).sum())
        if wrong:
            faults.append((name, "C2", f"{wrong} codes that the engine made are not the plan's: its own rounding"))
    return faults


def _differing(live: Tensor, want: Tensor, places: dict[str, Place]) -> list[str]:
    """Names whose rows, experts or columns differ; all of them where that cannot be told."""
    if live.shape != want.shape or live.dtype != want.dtype:
        return list(places)
    if not live.numel():
        return []
    same = live.contiguous().view(torch.uint8) == want.contiguous().view(torch.uint8) if live.dim() else live == want
    if bool(same.all()):
        return []
    count = len({place.expert for place in places.values()})
    first = next(iter(places.values()))
    if first.expert is not None and live.shape[0] == count:
        wrong = (~same.flatten(1)).any(1)
        return [name for name, place in places.items() if place.expert is not None and bool(wrong[place.expert])]
    rows = sum(place.shape[0] for place in places.values())
    if live.dim() == 2 and rows in live.shape:
        axis = list(live.shape).index(rows)
        wide = (live != want) if axis == 1 else ~same
        wrong = wide.any(1 - axis)
        named = [n for n, p in places.items() if bool(wrong[p.start : p.start + p.shape[0]].any())]
        return named or list(places)
    return list(places)


def _through_kernel(inside: Inside, module: nn.Module, places: dict[str, Place]) -> list[Fault]:
    """What the kernel of a linear makes of the identity, against the values."""
    faults: list[Fault] = []
    width = next(iter(places.values())).shape[1]
    want = {name: inside.values(name, torch.float32) for name in places}
    wrong = dict.fromkeys(places, 0)
    coded = not is_plain(module)
    unit = 6.0 if coded and any("nvfp4" in (inside.plan[n].sampler_weight or "") for n in places) else 1.0
    for start in range(0, width, IDENTITY_ROWS):
        stop = min(start + IDENTITY_ROWS, width)
        out = product(module, unit * identity(start, stop, width, like=inside)).float() / unit
        for name, place in places.items():
            got = out[:, place.start : place.start + place.shape[0]].T
            wanted = want[name][:, start:stop]
            exact = not coded or _is_mx(inside.plan[name].sampler_weight)
            slack = torch.zeros_like(wanted) if exact else wanted.abs() * ROUNDINGS + 1e-30
            wanted = wanted.to(inside.dtype).float() if exact else wanted
            wrong[name] += int((~((got - wanted).abs() <= slack)).sum())
    for name, count in wrong.items():
        if count:
            faults.append((name, "C3", f"the kernel of {places[name].module} multiplies by {count} other values"))
    return faults


def _tied_head(inside: Inside) -> list[Fault]:
    """A head that is the embedding has no name of its own, but a kernel may hold a copy."""
    head = getattr(inside.model, "lm_head", None)
    name = "model.embed_tokens.weight"
    if "lm_head.weight" in inside.places or head is None or not hasattr(head, "quant_method"):
        return []
    place = inside.places[name]
    faults = _through_kernel(inside, head, {name: place})
    return [(n, c, f"the tied head: {what}") for n, c, what in faults]


@torch.no_grad()
def multiply(inside: Inside, name: str, x_MK: Tensor) -> Tensor:
    """[M, N] of `x` by the kernel that reads a canonical weight, its bias included, in the engine's dtype."""
    place = inside.places[name]
    module = inside.module(place)
    out = product(module, x_MK.to(inside.device, inside.dtype))[:, place.start : place.start + place.shape[0]]
    bias = name.removesuffix("weight") + "bias"
    return out + inside.values(bias) if bias in inside.tensors else out


def product(module: nn.Module, x: Tensor) -> Tensor:
    """[M, N] of `x` [M, K] by a live linear, without its bias."""
    method: Any = module.quant_method
    return method.apply(module, x, None)


def identity(start: int, stop: int, width: int, *, like: Inside) -> Tensor:
    """Rows start .. stop of the identity of `width`, as a model wants its inputs."""
    eye = torch.zeros(stop - start, width, dtype=like.dtype, device=like.device)
    eye[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
    return eye


def _is_embedding(module: nn.Module, names: list[str]) -> bool:
    """The lookup itself reads plain storage; its product is looked at under the name of the head."""
    return names[0] == "model.embed_tokens.weight"


def _is_mx(quantizer: str | None) -> bool:
    return quantizer is None or quantizer.startswith(("mxfp8", "mxfp4"))
