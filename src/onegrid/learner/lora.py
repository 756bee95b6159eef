"""LoRA: low-rank factors are trained, and merged in FP32 into the masters once per version.

    master = base + s B A    s = alpha / rank;  A [rank, in], B [out, rank]; of experts [E, rank, in], [E, out, rank]
    dA = s B^T dW            dB = s dW A^T;     from dW, the gradient of the master, tensor by tensor

The merged master is what is rounded to BF16 and quantized, so there is no adapter branch in the forward: learner and
sampler read the same codes, as without LoRA. The base is a copy that nothing writes; subtracting what was added would
leave rounding errors behind. Source: Hu et al., "LoRA" (arXiv 2106.09685).
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onegrid.errors import CheckpointError, ConfigError, WeightsError
from onegrid.formats.digest import digests
from onegrid.learner.config import LoraConfig
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.stacks import is_stack, stacks

ALL_LINEAR = "all-linear"
FACTORS = ("lora_A", "lora_B")


def targeted(targets: Sequence[str], spec: ModelSpec) -> list[str]:
    """Storage keys of the weights that get an adapter, in forward order.

    targets  the end of a module's name from a dot on, as PEFT reads it ("q_proj", "layers.0.mlp.up_proj"; experts
             without their number, "experts.up_proj"), or "all-linear" for every projection: all but head and router
    Raises ConfigError for a target that no weight has, with the nearest one, and for what cannot have an adapter.
    """
    modules = {_module(key): key for key in stacks(spec) if key.endswith(".weight")}
    chosen: set[str] = set()
    for target in targets:
        found = [m for m in modules if _matches(m, target)]
        if not found:
            raise ConfigError(
                f"learner.lora.targets: no module is called {target!r}; {_nearest(target, list(modules))}"
            )
        for module in found:
            why = _refusal(module, spec)
            if why:
                raise ConfigError(
                    f"learner.lora.targets: {target!r} means {module}, which cannot have an adapter: {why}"
                )
        chosen |= set(found)
    return [key for module, key in modules.items() if module in chosen]


def adapter_shapes(config: LoraConfig, spec: ModelSpec) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Storage key -> shapes of A and of B, stacked for experts."""
    keys, shapes = stacks(spec), tensor_shapes(spec)
    out = {}
    for key in targeted(config.targets, spec):
        rows, columns = shapes[keys[key][0]]
        lead = (len(keys[key]),) if is_stack(key) else ()
        out[key] = ((*lead, config.rank, columns), (*lead, rows, config.rank))
    return out


class Adapters:
    """The factors of a learner, the copy of its base, and the hooks that turn gradients of masters into theirs.

    masters  FP32 by storage key, holding the base; they stop collecting gradients of their own
    start    factors by "name.lora_A" and "name.lora_B" of canonical modules, as `adapter_files.read_adapter` gives
             them; None draws A and leaves B at 0, so that training begins with the very bytes of the base
    """

    def __init__(
        self,
        config: LoraConfig,
        spec: ModelSpec,
        masters: Mapping[str, Tensor],
        *,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.config, self.masters = config, masters
        self.scale = config.alpha / config.rank
        keys = stacks(spec)
        self.names = {key: tuple(map(_module, keys[key])) for key in targeted(config.targets, spec)}
        self.base = {key: _exact_copy(masters[key]) for key in self.names}
        self.factors: dict[str, Tensor] = {}
        """FP32, trained, by "module.lora_A" and "module.lora_B", where the experts of a layer are one module."""
        self._digest: str | None = None
        for master in masters.values():
            master.requires_grad_(False)
        for key, (shape_a, shape_b) in adapter_shapes(config, spec).items():
            device = masters[key].device
            a = torch.stack([_drawn(config, name, shape_a[-2:]) for name in self.names[key]]).reshape(shape_a)
            self.factors[f"{_module(key)}.lora_A"] = a.to(device).requires_grad_()
            self.factors[f"{_module(key)}.lora_B"] = torch.zeros(shape_b, device=device).requires_grad_()
            masters[key].requires_grad_()
            masters[key].register_post_accumulate_grad_hook(self._collector(key))
        if start is not None:
            self._take(start)

    def merge(self) -> None:
        """Masters of this version, in FP32."""
        for key in self.base:
            self.masters[key].detach().copy_(self.merged(key))

    @torch.no_grad()
    def merged(self, key: str) -> Tensor:
        """FP32 base + s B A of one key. Where B A is 0 the base keeps its bytes, the sign of a zero too."""
        a, b = (self.factors[f"{_module(key)}.{factor}"] for factor in FACTORS)
        delta = torch.matmul(b, a).mul_(self.scale)
        base = self.base[key]
        return torch.where(delta == 0, base, base + delta)

    @torch.no_grad()
    def row_excess(self, key: str, row: int) -> Tensor:
        """FP64 [E or 1]: how far row `row` of the master of each tensor is from base + s B A, over its bound.

        Bound, with u = 2^-23 (twice the unit of FP32, so that arithmetic that truncates is within it): a sum of r
        products in any order is within (r + 2) u of the sum of their sizes, the factor s included; one more rounding of
        the master adds u of its size. Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.1.
        """
        a, b = (self.factors[f"{_module(key)}.{factor}"].double() for factor in FACTORS)
        at = row % b.shape[-2]
        b, have, base = (t[..., at : at + 1, :] for t in (b, self.masters[key].detach(), self.base[key]))
        want = base.double() + self.scale * torch.matmul(b, a)
        size = abs(self.scale) * torch.matmul(b.abs(), a.abs())
        bound = 2.0**-23 * ((self.config.rank + 2) * size + want.abs() + base.double().abs()) + 2.0**-126
        ratio = ((have.double() - want).abs() / bound).nan_to_num(nan=torch.inf)
        return ratio.amax((-2, -1)).reshape(-1)

    def _collector(self, key: str):
        @torch.no_grad()
        def collect(master: Tensor) -> None:
            dw, master.grad = master.grad, None  # one dense gradient at a time
            assert dw is not None
            a, b = (self.factors[f"{_module(key)}.{factor}"] for factor in FACTORS)
            for factor, gradient in ((a, torch.matmul(b.mT, dw)), (b, torch.matmul(dw, a.mT))):
                gradient *= self.scale
                factor.grad = gradient if factor.grad is None else factor.grad.add_(gradient)

        return collect

    def num_modules(self) -> int:
        """Canonical weights that carry an adapter."""
        return sum(map(len, self.names.values()))

    def tensors(self) -> dict[str, Tensor]:
        """Factors by canonical name, "model.layers.0.mlp.experts.3.up_proj.lora_A", as views."""
        out: dict[str, Tensor] = {}
        for key, names in self.names.items():
            for factor in FACTORS:
                whole = self.factors[f"{_module(key)}.{factor}"].detach()
                out |= {f"{name}.{factor}": whole[i] if is_stack(key) else whole for i, name in enumerate(names)}
        return out

    @torch.no_grad()
    def _take(self, start: Mapping[str, Tensor]) -> None:
        """Factors by canonical name into place. Raises WeightsError for a missing, extra or misshaped one."""
        wanted = self.tensors()
        missing, extra = sorted(wanted.keys() - start.keys()), sorted(start.keys() - wanted.keys())
        if missing or extra:
            raise WeightsError(
                f"the adapter does not fit learner.lora.targets {list(self.config.targets)}: "
                f"missing {missing[:4]}, beyond them {extra[:4]}"
            )
        for name, place in wanted.items():
            if start[name].shape != place.shape:
                raise WeightsError(
                    f"{name} of the adapter has shape {tuple(start[name].shape)}; rank {self.config.rank} and the "
                    f"model need {tuple(place.shape)}"
                )
            place.copy_(start[name])

    def base_digest(self) -> str:
        """Identifies the base weights: adapters mean nothing without them."""
        if self._digest is None:
            tensors = {key: self.base.get(key, master.detach()) for key, master in self.masters.items()}
            sums = digests([(t, "values") for t in tensors.values()])
            self._digest = hashlib.blake2b(repr(sums).encode(), digest_size=16).hexdigest()
        return self._digest

    def state_dict(self) -> dict[str, Any]:
        """Factors and what they are added to; the base itself is in the folder that training began with."""
        return {"factors": {name: t.detach() for name, t in self.factors.items()}, "base_digest": self.base_digest()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes factors back. Raises CheckpointError for other shapes or another base."""
        shapes = {name: tuple(t.shape) for name, t in self.factors.items()}
        if {name: tuple(t.shape) for name, t in state["factors"].items()} != shapes:
            raise CheckpointError("the state's adapters have another rank or other targets than learner.lora says")
        if state["base_digest"] != self.base_digest():
            raise CheckpointError(
                "the adapters of the state were trained on other base weights than those of model.checkpoint; "
                "give the folder that training began with"
            )
        for name, factor in self.factors.items():
            factor.copy_(state["factors"][name])


def _module(key: str) -> str:
    return key.removesuffix(".weight")


def _matches(module: str, target: str) -> bool:
    if target == ALL_LINEAR:
        return module.endswith("_proj")
    return module == target or module.endswith(f".{target}")


def _nearest(target: str, modules: list[str]) -> str:
    leaves = sorted({m.rpartition(".")[2] for m in modules if m.endswith("_proj")})
    choices = modules if "." in target else [ALL_LINEAR, *leaves]
    near = difflib.get_close_matches(target, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it can be {', '.join([ALL_LINEAR, *leaves])}"


def _refusal(module: str, spec: ModelSpec) -> str | None:
    """Why a module has no adapter; None where it can have one."""
    leaf = module.rpartition(".")[2]
    if leaf.endswith("_proj") or leaf == "lm_head":
        return None
    if leaf == "embed_tokens":
        tied = ", and the head is tied to it, so that both would move" if spec.tied else ""
        return f"it is a table that is looked up, not a linear{tied}"
    if leaf.endswith("norm"):
        return "it is a vector; low rank needs a matrix"
    return "PEFT cannot adapt it: the router is no linear there"


def _drawn(config: LoraConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    """A of one module, FP32 on the CPU, from the seed and its name alone."""
    seed = int.from_bytes(hashlib.blake2b(f"{config.seed}:{name}".encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    if config.init == "gaussian":
        return torch.randn(shape, generator=generator) / config.rank
    bound = 1.0 / math.sqrt(shape[-1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _exact_copy(master: Tensor) -> Tensor:
    """In BF16 where that loses nothing, as of most published checkpoints, else in FP32."""
    short = master.detach().to(torch.bfloat16)
    same = torch.equal(short.float().view(torch.int32), master.detach().view(torch.int32))
    return short if same else master.detach().clone()
