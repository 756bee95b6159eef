"""SGLang as a sampler, against its public API, for decoded weights: grid values in a plain BF16 engine.

Not run here: no environment at hand could start SGLang (its wheels want CUDA 13). What could be run against its wheel,
0.5.23, is in tests/engines/test_sglang.py: names of arguments and methods, and the loading functions of its models.

Weights go in by `begin_weight_update`, `update_weights_from_tensor` in groups, `end_weight_update` and `flush_cache`.
SGLang hands tensors to its own worker processes as pickles made here; none comes from elsewhere. What its modules hold
is read back by `get_weights_by_name`, whole tensors, which it has for models of the Llama family alone: for others
`digest` says that it cannot tell, and a guarded run stops unless its configuration says `guard.unknown = "record"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onegrid.errors import CapabilityError, ConfigError, SyncError
from onegrid.formats import QUANTIZERS, QuantTensor, dequantize, quantize
from onegrid.model.canonical import Canonical, parts_of
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.recipe import Plan
from onegrid.sampler.asked import check_prompts, check_sampling
from onegrid.sampler.base import Capabilities, Live
from onegrid.sampler.draw import stream, truncates
from onegrid.sampler.intake import Intake
from onegrid.sampler.rollouts import rollout_of
from onegrid.sampler.stops import DecodeText
from onegrid.types import Bucket, Manifest, Request, Rollout

WHOLE = 1 << 31
"""More rows than a tensor has: `get_weights_by_name` cuts what it returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SglangConfig:
    """How SGLang is started."""

    group_bytes: int = 1 << 28
    """Weights that travel in one call."""
    memory_share: float = 0.8
    """Share of the GPU's memory for weights and cache."""
    graphs: bool = True
    attention: Literal["", "fa3", "triton", "flashinfer"] = ""
    """Attention backend; empty: SGLang's choice."""

    def __post_init__(self) -> None:
        if self.group_bytes < 1 or not 0 < self.memory_share < 1:
            raise ConfigError(
                f"group_bytes is {self.group_bytes} and memory_share {self.memory_share}; allowed: at least 1, and "
                "between 0 and 1"
            )


def engine_arguments(config: SglangConfig, folder: str, *, max_len: int, max_slots: int) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for a checkpoint in `folder`, whose weights it starts with."""
    attention = {"attention_backend": config.attention} if config.attention else {}
    return attention | {
        "model_path": folder,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "context_length": max_len,
        "max_running_requests": max_slots,
        "mem_fraction_static": config.memory_share,
        "disable_cuda_graph": not config.graphs,
        "random_seed": 0,
        "log_level": "error",
    }


def generate_arguments(requests: Sequence[Request]) -> dict[str, Any]:
    """Arguments of `Engine.generate`: token ids in, the sampled tokens' log-probabilities out, a seed for each."""
    return {
        "input_ids": [list(r.prompt_tokens) for r in requests],
        "sampling_params": [
            {
                "temperature": r.sampling.temperature,
                "max_new_tokens": r.sampling.max_new_tokens,
                "stop_token_ids": list(r.sampling.stop_token_ids),
                "ignore_eos": True,
                "sampling_seed": stream(r) & (2**31 - 1),
            }
            for r in requests
        ],
        "return_logprob": True,
        "logprob_start_len": -1,
    }


def values_of(canonical: Canonical) -> Tensor:
    """The BF16 tensor that a plain engine loads; exact for MX formats and FP8 blocks with power-of-two scales."""
    return dequantize(canonical, torch.bfloat16) if isinstance(canonical, QuantTensor) else canonical.to(torch.bfloat16)


class SglangStore:
    """Follows `sampler.intake.Store`: canonical bytes here, the engine's own tensors derived from them."""

    def __init__(self, spec: ModelSpec, plan: Plan, engine: Any, config: SglangConfig) -> None:
        self.engine, self.config, self.spec = engine, config, spec
        self.tensors: dict[str, Canonical] = {}
        for name, shape in tensor_shapes(spec).items():
            zeros = torch.zeros(shape, dtype=torch.bfloat16)
            quantizer = plan[name].sampler_weight
            self.tensors[name] = zeros if quantizer is None else quantize(zeros, QUANTIZERS[quantizer])

    def names(self) -> list[str]:
        """Every canonical name."""
        return list(self.tensors)

    def parts(self, name: str) -> dict[str, Tensor]:
        """Canonical storage by part."""
        return parts_of(self.tensors[name])

    def canonical(self, name: str) -> Canonical:
        """The tensor as views of that storage."""
        return self.tensors[name]

    def derive(self) -> None:
        """Takes every tensor into the engine, in one session of its own. SyncError C3 with its words if it refuses."""
        _demand(self.engine.begin_weight_update(), "begin_weight_update")
        try:
            for group in grouped(self.tensors, self.config.group_bytes):
                _demand(self.engine.update_weights_from_tensor(group, flush_cache=False), "update_weights_from_tensor")
        finally:
            _demand(self.engine.end_weight_update(), "end_weight_update")
        _demand(self.engine.flush_cache(), "flush_cache")

    def verify(self) -> None:
        """SyncError C3 naming tensors that the engine holds otherwise; CapabilityError where it does not tell."""
        wrong = []
        for name, canonical in self.tensors.items():
            told = self.engine.get_weights_by_name(name, truncate_size=WHOLE)
            if told is None:
                raise CapabilityError(
                    f"SGLang does not say what it holds of {name} (its models of family {self.spec.family} cannot); "
                    'its weights cannot be proved. guard.unknown = "record" goes on without'
                )
            if not torch.equal(torch.tensor(told, dtype=torch.float32), values_of(canonical).float()):
                wrong.append(name)
        if wrong:
            listed = ", ".join(wrong[:6])
            raise SyncError(f"SGLang holds other values of {listed}", condition="C3", tensors=tuple(wrong))


def grouped(tensors: Mapping[str, Canonical], group_bytes: int) -> Iterable[list[tuple[str, Tensor]]]:
    """(name, BF16 values) of all tensors, in groups of at most `group_bytes`, or of one tensor that is larger."""
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, canonical in tensors.items():
        values = values_of(canonical)
        if group and size + values.nbytes > group_bytes:
            yield group
            group, size = [], 0
        group.append((name, values))
        size += values.nbytes
    if group:
        yield group


class SglangSampler:
    """Follows `base.Sampler`.

    engine  an `sglang.Engine`, started with `engine_arguments` on a checkpoint of `spec`
    Raises CapabilityError for a plan that asks for quantized inputs, which a plain engine does not make.
    """

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        engine: Any,
        config: SglangConfig,
        *,
        max_len: int,
        decode_text: DecodeText | None = None,
    ) -> None:
        wrong = [t.name for t in plan.tensors.values() if t.sampler_activation is not None]
        if wrong:
            raise CapabilityError(
                f"the plan quantizes the inputs of {wrong[0]} and {len(wrong) - 1} more in the sampler; this adapter "
                'gives SGLang decoded weights only: say sampler_activation = "bf16" in the recipe'
            )
        self.spec, self.plan, self.engine = spec, plan, engine
        self.max_len, self.decode_text = max_len, decode_text
        self.store = SglangStore(spec, plan, engine, config)
        self.intake = Intake(self.store, plan_digest=plan.digest)

    @property
    def version(self) -> int | None:
        """Version that serves."""
        return self.intake.version

    @property
    def capabilities(self) -> Capabilities:
        """No bits, kept sets, routing, stop strings or graph probe; loads what decodes to BF16. Not run here."""
        return Capabilities(bits=False, kept_set=False, routing=False, stop_strings=False, captured=False)

    def describe(self) -> dict[str, Live]:
        """Formats are those of the plan only where the engine's values are proved to be on their grid."""
        self.store.verify()
        return {
            name: Live(
                format=self.plan[name].sampler_weight or "bf16",
                shape=tuple(canonical.shape),
                kernel="plain",
                layout="decoded bf16",
                activation="bf16",
            )
            for name, canonical in self.store.tensors.items()
        }

    def generate(
        self, requests: Sequence[Request], on_finished: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """See `base.Sampler.generate`; `on_finished` is told when the call is over."""
        for request in requests:
            self._check(request)
        version = self._serving()
        self.intake.settle()
        outputs = self.engine.generate(**generate_arguments(requests)) if requests else []
        rollouts = [self._rollout(*pair, version) for pair in zip(requests, outputs, strict=True)]
        for rollout in rollouts if on_finished is not None else ():
            on_finished(rollout)  # type: ignore[misc]
        return rollouts

    def probe(self, prompts: Sequence[Sequence[int]], captured: bool = False) -> list[Tensor]:
        """FP32 [V] log-probabilities, at temperature 1, of the token after each prompt."""
        if captured:
            raise CapabilityError(
                "this adapter cannot tell captured graphs from eager calls; probe with captured=False"
            )
        self._serving()
        ids = list(range(self.spec.vocab_size))
        outputs = self.engine.generate(
            input_ids=[list(p) for p in prompts],
            sampling_params={"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            token_ids_logprob=ids,
        )
        answers = []
        for output in outputs:
            answer_V = torch.full((len(ids),), -torch.inf)
            for logp, token, *_ in output["meta_info"]["output_token_ids_logprobs"][0]:
                answer_V[token] = logp
            answers.append(answer_V)
        return answers

    def begin(self, manifest: Manifest) -> None:
        """See `Intake.begin`."""
        self.intake.begin(manifest)

    def receive(self, bucket: Bucket) -> None:
        """See `Intake.receive`."""
        self.intake.receive(bucket)

    def commit(self, version: int) -> float | None:
        """See `Intake.commit`."""
        return self.intake.commit(version)

    def abort(self) -> None:
        """See `Intake.abort`."""
        self.intake.abort()

    def digest(self, names: Iterable[str]) -> dict[str, int]:
        """Digests of the canonical bytes, after proof that the engine's values follow from them."""
        return self.intake.digest(names)

    def sleep(self) -> None:
        """Gives memory back; needs an engine that was started with its memory saver."""
        self.engine.release_memory_occupation()

    def wake(self) -> None:
        """Takes memory and weights again, and proves them."""
        self.engine.resume_memory_occupation()
        self.store.derive()
        self.intake.verify()

    def close(self) -> None:
        """Ends the engine."""
        self.engine.shutdown()

    def _serving(self) -> int:
        if self.version is None or not self.intake.serving:
            raise SyncError("no version of the weights is complete and proved; synchronize first", condition="C5")
        return self.version

    def _check(self, request: Request) -> None:
        sampling, who = request.sampling, f"prompt {request.prompt_index}, sample {request.sample}"
        check_sampling(sampling, who)
        check_prompts([request.prompt_tokens], self.spec.vocab_size, self.max_len)
        needed = len(request.prompt_tokens) + sampling.max_new_tokens
        for wrong, told in (
            (needed > self.max_len, f"prompt and response need {needed} positions, the engine has {self.max_len}"),
            (truncates(sampling), "top_p or top_k truncates, and SGLang does not tell the kept set"),
            (bool(sampling.stop_strings), "stop strings are not matched as the embedded engine does; use stop ids"),
            (sampling.record_routing, "this adapter does not record routing"),
        ):
            if wrong:
                raise CapabilityError(f"{who}: {told}")

    def _rollout(self, request: Request, output: Mapping[str, Any], version: int) -> Rollout:
        pairs = output["meta_info"]["output_token_logprobs"]
        tokens, logps = [int(p[1]) for p in pairs], [float(p[0]) for p in pairs]
        return rollout_of(request, tokens, logps, version=version, decode_text=self.decode_text)


def _demand(answer: Any, what: str) -> None:
    """SyncError unless an answer of the engine says success; what is not understood is none."""
    success = answer[0] if isinstance(answer, tuple) else getattr(answer, "success", None)
    if success is not True:
        raise SyncError(f"SGLang did not do {what}: {answer!r:.300}", condition="C3")
