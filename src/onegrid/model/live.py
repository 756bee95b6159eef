"""Weights of one version as a side holds them: canonical codes and scales, and what matmuls read, derived from them.

Storage is allocated once and written in place, so that addresses survive every update. The derived operands are never
written by anything but `derive`, and `verify` proves that they still follow from the canonical bytes. With "codes"
there are none: a matmul reads the codes, or values that are derived for it alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from onegrid.errors import CapabilityError, SyncError, WeightsError
from onegrid.formats import QUANTIZERS, Quantizer, QuantTensor, quantize
from onegrid.model.canonical import Canonical, parts_of
from onegrid.model.decoder import EMBEDDING
from onegrid.model.derived import unequal
from onegrid.model.few import FewRows
from onegrid.model.packed import PackedWeights
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.stacks import is_stack, stack_key, stacks
from onegrid.ops.few_cuda import few_matmul
from onegrid.ops.grouped import Dispatch, grouped_matmul, take
from onegrid.ops.linear import matmul
from onegrid.ops.matmul_choice import Choice
from onegrid.ops.native import BLOCK, joined_rows, kind_of, native_operand, native_operand_of, refusal
from onegrid.ops.operand import Operand, operand, operand_of, row_of
from onegrid.ops.packed_cuda import packed_matmul
from onegrid.ops.pins import TILE, pin, round_up
from onegrid.ops.producers import fuses
from onegrid.ops.table import kernels_for
from onegrid.recipe import Plan


class LiveWeights:
    """All tensors of a model on one side of a plan, with the linear of the side that has no gradients.

    side     "learner" or "sampler": whose quantizers of the plan to use
    kernels  see `ops.table.kernels_for`; the other side must have the same
    weights  "decoded" keeps an operand of every weight. "auto" too, and matmuls of few rows read packed weights where
             `model.packed` finds that better, or BF16 ones by our kernel where `model.few` does. "codes" keeps none: on
             a sampler's GPU matmuls of few rows read packed weights wherever a kernel has the same bytes, all others
             what `read` derives for them
    Starts as zeros; nothing may be computed before the first `derive`.
    """

    tile = TILE

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        *,
        side: str,
        device: torch.device | str = "cpu",
        kernels: str = "auto",
        weights: str = "auto",
    ) -> None:
        pin(device)
        self.spec, self.plan, self.side = spec, plan, side
        self.device = torch.device(device)
        self.kernels = kernels_for(
            device, num_heads=spec.num_heads, num_groups=spec.num_kv_heads, head_dim=spec.head_dim, choice=kernels
        )
        self.keys = stacks(spec)
        self.held: dict[str, Canonical] = {}
        self.weights = weights
        self.operands: dict[str, Operand] = {}
        self.saved_bytes = 0
        """Of a learner's operands that are not kept, after the first `derive`."""
        self.joined: dict[tuple[str, ...], Operand] = {}
        self.activation = {key: self._quantizer(key, "activation") for key in self.keys}
        self.native = {key for key in self.keys if plan.matmul == "native" and self._takes_native(key)}
        """Linears whose products are the matrix unit's own; see `ops.native`."""
        shapes = tensor_shapes(spec)
        for key, names in self.keys.items():
            shape = (len(names), *shapes[names[0]]) if is_stack(key) else shapes[names[0]]
            quantizer = self._quantizer(key, "weight")
            self._refuse_unreadable(key, quantizer)
            self.held[key] = self._allocate(shape, quantizer)
        self.groups = joinable(spec)
        self.packed: PackedWeights | None = None
        if side == "sampler" and weights != "decoded" and self.device.type == "cuda":
            self.packed = PackedWeights(
                self.held, self.groups, self.activation, self.device, decoded=self.keeps_operands
            )
        self.few: FewRows | None = None
        if side == "sampler" and weights == "auto" and self.kernels.can_capture:
            self.few = FewRows(self.held, self.groups, self.activation, self.device)

    @property
    def keeps_operands(self) -> bool:
        """Whether there is derived state at all."""
        return self.weights != "codes"

    def _quantizer(self, key: str, role: str):
        """The quantizer of a key; the plan has checked that all tensors of a stack agree."""
        planned = self.plan[self.keys[key][0]]
        name = getattr(planned, f"sampler_{role}" if self.side == "sampler" else role)
        return None if name is None else QUANTIZERS[name]

    def _takes_native(self, key: str) -> bool:
        """Quantized dense linears do; stacked experts stay with the grid. CapabilityError where one cannot."""
        quantizer, activation = self._quantizer(key, "weight"), self.activation[key]
        if quantizer is None or activation is None or is_stack(key):
            return False
        why = refusal(quantizer, activation, tensor_shapes(self.spec)[key], self.device)
        if why:
            raise CapabilityError(f'recipe.matmul = "native", {key}: {why}; leave recipe.matmul out for the grid')
        return True

    def native_shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """Shapes of linears with native products, by kind of operand, for the proof at start."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for key in sorted(self.native):
            shapes.setdefault(kind_of(self._quantizer(key, "weight")), []).append(tensor_shapes(self.spec)[key])
        return shapes

    def _refuse_unreadable(self, key: str, quantizer) -> None:
        """What the decoder reads as a plain tensor may be quantized only to values that need no factor."""
        read_plain = not key.endswith("_proj.weight")
        if read_plain and (self.activation[key] is not None or (quantizer and quantizer.matmul != "decoded")):
            raise CapabilityError(
                f"{key}: the embedded decoder reads it as a tensor, not through a linear; the plan asks for weight "
                f"{quantizer} and activation {self.activation[key]}. Keep it in BF16, or quantize its weight only and "
                "to a format whose values are exact in BF16 (an MX format, FP8 blocks with power-of-two scales)"
            )

    def _allocate(self, shape: tuple[int, ...], quantizer) -> Canonical:
        zeros = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        if quantizer is None:
            return zeros
        q = quantize(zeros, quantizer)
        return dataclasses.replace(
            q,
            codes=q.codes.clone(),
            scales=q.scales.clone(),
            amax=None if q.amax is None else q.amax.clone().contiguous(),
        )

    def parts(self, name: str) -> dict[str, Tensor]:
        """The canonical storage of one tensor by part ("codes", "scales", "amax" or "values"), as writable views."""
        key = stack_key(name)
        if key not in self.keys:
            raise WeightsError(f"no tensor {name!r} in this model")
        held = self.held[key]
        parts = parts_of(held)
        if is_stack(key):
            index = self.keys[key].index(name)
            parts = {part: tensor[index] for part, tensor in parts.items()}
        return parts

    def canonical(self, name: str) -> Canonical:
        """One tensor as views of the live storage."""
        held = self.held[stack_key(name)]
        parts = self.parts(name)
        if isinstance(held, Tensor):
            return parts["values"]
        shape = held.shape[1:] if is_stack(stack_key(name)) else held.shape
        return dataclasses.replace(
            held, codes=parts["codes"], scales=parts["scales"], amax=parts.get("amax"), factor=None, shape=shape
        )

    def names(self) -> list[str]:
        """Every canonical name, in forward order."""
        return list(tensor_shapes(self.spec))

    def write(self, key: str, value: Canonical) -> None:
        """Copies a whole key's tensor into the canonical storage."""
        source = parts_of(value)
        for part, tensor in parts_of(self.held[key]).items():
            tensor.copy_(source[part])

    def derive(self, keys: Iterable[str] | None = None) -> None:
        """Computes the operands of `keys` (None for all) from the canonical storage, into the same addresses."""
        if not self.keeps_operands:
            if self.side == "learner" and not self.saved_bytes:
                self.saved_bytes = sum(map(self._derived_bytes, self.keys))
            keys = ()
        for key in self.keys if keys is None else keys:
            new = self._derived(key)
            if new is None:
                continue
            old = self.operands.get(key)
            if old is None:
                self.operands[key] = _owned(new)
            else:
                for have, want in zip(_tensors(old), _tensors(new), strict=True):
                    have.copy_(want)
        if self.device.type == "cuda" and self.operands and not self.joined:
            self._join()
        if self.packed is not None:
            self.packed.check()

    def _join(self) -> None:
        """Lays operands that read the same activations one after another, so that one matmul reads them all.

        A column's sum does not know its neighbours, so the bytes stay. Members become views of the joined storage.
        """
        for keys in self.groups:
            parts = [self.operands[key] for key in keys if key in self.operands]
            if len(parts) < len(keys) or len({(p.kind, p.row is None, p.block is None) for p in parts}) > 1:
                continue
            if parts[0].kind == "native_tensor":
                continue  # each has a scale of its own
            values = joined_rows([p.values for p in parts])
            rows = BLOCK if parts[0].kind == "native_block" else 1  # of values that share a row of scales
            row = None if parts[0].row is None else torch.cat([_given(p.row) for p in parts])
            block = None if parts[0].block is None else torch.cat([_given(p.block) for p in parts])
            self.joined[keys] = Operand(values, parts[0].kind, row, block)
            start = 0
            for key, part in zip(keys, parts, strict=True):
                at = slice(start, start + len(part.values))
                scales = slice(at.start // rows, at.stop // rows)
                self.operands[key] = Operand(
                    values[at], part.kind, None if row is None else row[at], None if block is None else block[scales]
                )
                start = at.stop

    def read(self, key: str) -> Operand:
        """What a matmul reads of `key`: the operand that is kept, or one derived from the codes now."""
        if self.keeps_operands:
            return self.operands[key]
        new = self._derived(key)
        assert new is not None
        return new

    def _derived_bytes(self, key: str) -> int:
        new = self._derived(key)
        return 0 if new is None else sum(t.nbytes for t in _tensors(new))

    def _derived(self, key: str) -> Operand | None:
        """What a matmul reads of `key`; None for vectors, which are read as they are."""
        held = self.held[key]
        if isinstance(held, QuantTensor):
            return native_operand_of(held) if key in self.native else operand_of(held)
        return operand(held, None) if held.dim() >= 2 else None

    def verify(self, keys: Iterable[str] | None = None) -> None:
        """Raises SyncError (C3) naming all tensors whose operand differs in any byte from its re-derivation.

        Where no operand is kept there is nothing that could.
        keys  None for all. Where there is another side in this process, comparing with it is cheaper.
        """
        wrong: list[str] = []
        for key in unequal((key, self._again(key)) for key in (self.keys if keys is None else keys)):
            names, pairs = self.keys[key], self._again(key)
            each = [(name, [(x[i], y[i]) for x, y in pairs]) for i, name in enumerate(names)] if is_stack(key) else []
            wrong += unequal(each) or names  # all of them where a derivation does not even repeat
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            raise SyncError(
                f"the operand that matmuls read is not the one its codes and scales stand for: {shown}",
                condition="C3",
                tensors=tuple(wrong),
            )

    def _again(self, key: str) -> list[tuple[Tensor, Tensor]]:
        """What is kept of an operand beside what its codes give now; nothing where none is kept."""
        new = self._derived(key) if self.keeps_operands else None
        return [] if new is None else list(zip(_tensors(self.operands[key]), _tensors(new), strict=True))

    def tensor(self, name: str) -> Tensor:
        """An unquantized tensor for the decoder: the operand's values where one is kept, else BF16."""
        held = self.held[name]
        if isinstance(held, Tensor) and (held.dim() < 2 or not self.keeps_operands):
            return held
        return self.read(name).values

    def embedded(self, tokens_N: Tensor) -> Tensor:
        """See `model.decoder.Weights`."""
        return torch.nn.functional.embedding(tokens_N, self.tensor(EMBEDDING)).to(torch.bfloat16)

    def input_operand(self, key: str, x: Tensor, dispatch: Dispatch | None = None) -> Operand:
        """The activations as `key`'s matmul reads them. Rows are quantized before they are sent to experts."""
        quantizer = self.activation[key]
        if quantizer is not None and key in self.native:
            return native_operand(x, quantizer)
        quantized = operand(x, quantizer)
        return quantized if dispatch is None else send(quantized, dispatch)

    def linear(
        self, keys: tuple[str, ...], x: Tensor | Operand, dispatch: Dispatch | None = None, *, sent: bool = False
    ) -> list[Tensor]:
        """See `model.decoder.Weights`."""
        if isinstance(x, Tensor) and sent and dispatch is not None and spans_rows(self.activation[keys[0]]):
            x = dispatch.cleared(x)
        a = x if isinstance(x, Operand) else self.input_operand(keys[0], x, None if sent else dispatch)
        if dispatch is not None:
            return [grouped_matmul(a, self.read(key), dispatch) for key in keys]
        if len(keys) > 1 and self._as_one(keys, len(a.values)):
            return list(self._product(keys, a).split([self.held[key].shape[0] for key in keys], dim=-1))
        return [self._product((key,), a) for key in keys]

    def _as_one(self, keys: tuple[str, ...], num_rows: int) -> bool:
        """Whether one matmul reads all of `keys`."""
        return keys in self.joined or (self.packed is not None and self.packed.of(keys, num_rows) is not None)

    def _product(self, keys: tuple[str, ...], a: Operand) -> Tensor:
        """One matmul: of packed weights, of what is kept, or of what is derived now and dropped."""
        whole = self.operands.get(keys[0]) if len(keys) == 1 else self.joined.get(keys)
        packed = None if self.packed is None else self.packed.of(keys, len(a.values))
        if packed is not None:
            return packed_matmul(a, packed, self._rows_of(keys) if whole is None else whole.row)
        few = self.few is not None and self.few.takes(keys, len(a.values))
        if few and whole is not None and a.kind == whole.kind == "decoded":
            return few_matmul(a, whole)
        return matmul(a, whole or self.read(keys[0]), bias_N=self._bias_of(keys))

    @property
    def choices(self) -> list[Choice]:
        """What was measured, and taken, for matmuls of few rows."""
        return [choice for one in (self.packed, self.few) if one is not None for choice in one.choices]

    def _rows_of(self, keys: tuple[str, ...]) -> Tensor | None:
        """FP32 [N]: factors per row of the weights below each other, from where the format has them; None without."""
        rows = [row for key in keys if isinstance(q := self.held[key], QuantTensor) and (row := row_of(q)) is not None]
        return torch.cat(rows) if rows else None

    def fuses(self, key: str, width: int) -> Quantizer | None:
        """See `model.decoder.Weights`."""
        quantizer = self.activation[key]
        if quantizer is None or key in self.native or not self.kernels.can_capture or not fuses(quantizer, width):
            return None
        return quantizer

    def multiply(self, key: str, x: Tensor) -> Tensor:
        """What the live kernel of one linear makes of x BF16 [..., M, K], its neighbours in one matmul included."""
        if is_stack(key):
            return matmul(self.input_operand(key, x, None), self.read(key))
        rows = round_up(len(x), TILE)
        keys = next((keys for keys in self.groups if key in keys and self._as_one(keys, rows)), (key,))
        return self.linear(keys, x)[keys.index(key)]

    def _bias_of(self, keys: tuple[str, ...]) -> Tensor | None:
        biases = [b for key in keys if (b := self.bias(key)) is not None]
        assert len(biases) in (0, len(keys))
        return torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None

    def bias(self, key: str) -> Tensor | None:
        """The bias of a linear, or None."""
        held = self.held.get(key.removesuffix("weight") + "bias")
        assert held is None or isinstance(held, Tensor)
        return held

    def num_bytes(self, *, quantized: bool = False) -> dict[str, int]:
        """Bytes of canonical storage and of derived operands; of quantized tensors alone, if asked for."""
        keys = [key for key, held in self.held.items() if isinstance(held, QuantTensor) or not quantized]
        held = sum(t.nbytes for key in keys for t in parts_of(self.held[key]).values())
        kept = [self.operands[key] for key in keys if key in self.operands]
        return {"canonical": held, "derived": sum(t.nbytes for o in kept for t in _tensors(o))}


def spans_rows(quantizer: Quantizer | None) -> bool:
    """Whether one number of a quantizer looks at all rows, so that rows nobody owns must be zero."""
    return quantizer is not None and quantizer.span == "tensor"


def send(a: Operand, dispatch: Dispatch) -> Operand:
    """Rows of a two-axis operand at the experts' places; empty places are zero."""
    row = None if a.row is None else take(a.row, dispatch.source)
    block = None if a.block is None else take(a.block, dispatch.source)
    return Operand(take(a.values, dispatch.source), a.kind, row, block)


def joinable(spec: ModelSpec) -> list[tuple[str, ...]]:
    """Dense linears that read the same activations, layer by layer: q, k, v; gate, up."""
    groups = []
    for layer in range(spec.num_layers):
        at = f"model.layers.{layer}"
        groups.append(tuple(f"{at}.self_attn.{name}_proj.weight" for name in "qkv"))
        if layer not in spec.moe_layers:
            groups.append(tuple(f"{at}.mlp.{name}_proj.weight" for name in ("gate", "up")))
    return groups


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _tensors(o: Operand) -> list[Tensor]:
    return [t for t in (o.values, o.row, o.block) if t is not None]


def _owned(o: Operand) -> Operand:
    """An operand with storage of its own, no views and no broadcast axes."""
    row = None if o.row is None else o.row.clone(memory_format=torch.contiguous_format)
    block = None if o.block is None else o.block.clone(memory_format=torch.contiguous_format)
    return Operand(o.values.clone(memory_format=torch.contiguous_format), o.kind, row, block)
