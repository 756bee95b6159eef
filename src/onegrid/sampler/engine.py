"""The embedded engine: a sampler whose log-probabilities are the learner's own bits.

Continuous batching on one device. A completion depends on its request and the weights only: not on the batch, the
order of requests, or the number of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from onegrid.errors import CapabilityError, ConfigError, SyncError
from onegrid.formats import QuantTensor
from onegrid.model.canonical import format_of
from onegrid.model.decoder import head_name
from onegrid.model.live import LiveWeights
from onegrid.model.rope import rope_table
from onegrid.model.stacks import is_stack, stack_key
from onegrid.model.taps import Taps
from onegrid.ops.logprob import log_probs
from onegrid.ops.operand import Operand
from onegrid.ops.pins import TILE, round_up
from onegrid.recipe import Plan
from onegrid.sampler.asked import check_prompts, check_sampling
from onegrid.sampler.base import Capabilities, Live
from onegrid.sampler.cache import Cache, PrefixStore
from onegrid.sampler.captured import CapturedGeneration, can_capture, probe_captured
from onegrid.sampler.draw import truncates
from onegrid.sampler.generation import Generation
from onegrid.sampler.graphs import Graphs
from onegrid.sampler.intake import Intake
from onegrid.sampler.prefill import Model, chunks, prefill, trace
from onegrid.sampler.remote import RemoteConfig
from onegrid.sampler.serving import Serving, proved_addresses, read_addresses
from onegrid.sampler.stops import DecodeText
from onegrid.sampler.vllm.config import VllmConfig
from onegrid.types import Bucket, Manifest, Request, Rollout, Sampling

KEPT = ("record", "refuse")
WEIGHTS = ("auto", "decoded", "codes")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """Which sampler, and its sizes. None of the sizes changes a token."""

    engine: Literal["embedded", "remote", "vllm"] = "embedded"
    """"embedded": in this process, with the learner's own operations. "remote": behind HTTP; see `[sampler.remote]`,
    and give the sizes to `onegrid serve` there. "vllm": vLLM on this machine; see `[sampler.vllm]`."""
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    max_slots: int = 128
    """Completions that run at once."""
    max_len: int = 1024
    """Positions of a slot: prompt and response together."""
    prefill_tokens: int = 8192
    """Most prompt tokens of one forward pass; a longer prompt has one of its own."""
    prefix_tokens: int = 16384
    """Prompt tokens kept for samples that still wait; 0 shares only within one admission."""
    capture: bool = True
    """Decode in CUDA graphs where the kernels can be captured. Kept sets and stop strings run without."""
    weights: str = "auto"
    """What matmuls read. "decoded": operands, decoded once per version and kept beside codes and scales. "auto": those
    too, and where few rows are faster on a GPU from packed codes, these, or in BF16 by our own kernel, that one.
    "codes": codes and scales alone, packed where a kernel covers the matmul, else decoded for each use: the same bytes,
    2 bytes a weight less on a GPU (4 on a CPU), more time."""
    kept: str = "record"
    """Under top-p or top-k: "record" the kept set of every token, or "refuse" to truncate."""

    def __post_init__(self) -> None:
        for name in ("max_slots", "max_len", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefix_tokens < 0:
            raise ConfigError(f"prefix_tokens is {self.prefix_tokens}; it must be at least 0")
        if self.weights not in WEIGHTS:
            raise ConfigError(f"weights is {self.weights!r}; allowed are {', '.join(WEIGHTS)}")
        if self.kept not in KEPT:
            raise ConfigError(f"kept is {self.kept!r}; allowed are {', '.join(KEPT)}")


class Engine:
    """Samples from `weights`, which an update changes in place.

    weights      side "sampler"; the engine is the only one to write them
    version      of weights that are loaded already and derived; None waits for a first commit
    decode_text  token ids to text, for stop strings and Rollout.text
    """

    def __init__(
        self,
        weights: LiveWeights,
        config: SamplerConfig,
        *,
        version: int | None = None,
        decode_text: DecodeText | None = None,
    ) -> None:
        spec = weights.spec
        head = head_name(spec)
        if isinstance(weights.canonical(head), QuantTensor):
            raise CapabilityError(f"{head} is quantized by the plan; the embedded engine reads logits in BF16 only")
        if config.max_len > spec.max_positions:
            raise ConfigError(f"max_len {config.max_len} is beyond the model's {spec.max_positions} positions")
        self.weights, self.config, self.decode_text = weights, config, decode_text
        self.intake = self._intake(version)
        self.rope = rope_table(spec, config.max_len, weights.device)
        self.prefixes = PrefixStore(config.prefix_tokens)
        self.graphs: Graphs | None = None
        self.cache: Cache | None = self._allocate()

    def adopt(self, plan: Plan) -> None:
        """Goes over to another plan of the same model, with storage anew: nothing serves until the next commit."""
        kernels = self.weights.kernels
        device, weights = self.weights.device, self.weights.weights
        self.weights = LiveWeights(self.weights.spec, plan, side="sampler", device=device, weights=weights)
        self.weights.kernels = kernels
        self.intake = self._intake()
        self.prefixes.clear()
        if self.graphs is not None:
            self.graphs.reset()  # they read the storage before

    def _intake(self, version: int | None = None) -> Intake:
        weights = self.weights
        return Intake(weights, plan_digest=weights.plan.digest, version=version, keeps_staging=weights.keeps_operands)

    @property
    def version(self) -> int | None:
        """Version that serves."""
        return self.intake.version

    @property
    def capabilities(self) -> Capabilities:
        """What the engine does with this model and configuration."""
        return Capabilities(
            bits=True,
            kept_set=self.config.kept == "record",
            routing=bool(self.weights.spec.moe_layers),
            stop_strings=self.decode_text is not None,
            captured=self._captures,
        )

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], on_finished: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """See `Sampler.generate`. Requests of different Sampling run one Sampling after another.

        routing_RLE[t] holds the experts of the position whose output drew token t: the one before it.

        CapabilityError for what cannot be done, before anything runs; NonFiniteError naming a request where logits are
        not finite; SyncError where no proved version is there.
        """
        for request in requests:
            self._check(request)
        cache, model = self._serving()
        self.intake.settle()
        by_sampling: dict[Sampling, list[int]] = {}
        for index, request in enumerate(requests):
            by_sampling.setdefault(request.sampling, []).append(index)
        rollouts: dict[int, Rollout] = {}
        try:
            for indices in by_sampling.values():
                generation = self._generation(model, cache, [requests[i] for i in indices])
                for at, rollout in generation.run():
                    rollouts[indices[at]] = rollout
                    if on_finished is not None:
                        on_finished(rollout)
        except BaseException as error:
            cache.clear()
            self.prefixes.clear()
            if isinstance(error, torch.OutOfMemoryError):
                self._after_memory_ran_out(error)
            raise
        return [rollouts[i] for i in range(len(requests))]

    def _after_memory_ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Leaves an engine that serves smaller calls, and a note of what makes them smaller."""
        if self.graphs is not None:
            self.graphs.reset()
        config = self.config
        error.add_note(
            f"the sampler ran out of memory and dropped the call; lower sampler.max_slots (now {config.max_slots}), "
            f"sampler.prefill_tokens ({config.prefill_tokens}) or sampler.max_len ({config.max_len})"
        )
        if self.weights.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def probe(self, prompts: Sequence[Sequence[int]], captured: bool = False) -> list[Tensor]:
        """FP32 [V] log-probabilities, at temperature 1, of the token after each prompt. Does not count as serving.

        CapabilityError for a prompt that is empty, too long, or holds what is no token.
        """
        _, model = self._serving()
        check_prompts(prompts, self.weights.spec.vocab_size, self.config.max_len)
        if captured:
            if self.graphs is None:
                raise CapabilityError(f"no captured graphs here: {self._why_not}; probe with captured=False")
            return probe_captured(self.graphs, model, prompts)
        out: list[Tensor] = []
        for chunk in chunks([tuple(prompt) for prompt in prompts], self.config.prefill_tokens):
            hidden_BD = prefill(model, chunk, record_routing=False).hidden_BD
            out += log_probs(model.logits(hidden_BD), 1.0).cpu().unbind()
        return out

    @torch.no_grad()
    def trace(self, prompts: Sequence[tuple[int, ...]]) -> Taps:
        """What every linear and attention of what serves gives for whole prompts, for a check. Does not use graphs."""
        return trace(self._serving()[1], prompts)

    def describe(self) -> dict[str, Live]:
        """Every canonical tensor, from its live storage."""
        return {name: self._describe(name) for name in self.weights.names()}

    @torch.no_grad()
    def multiply(self, key: str, x: Tensor) -> Tensor:
        """What the live kernel of one linear makes of `x` BF16 [..., M, K]: BF16 [..., M, N], for a check.

        key  of `model.stacks`; that of stacked experts takes and gives one matrix for each of them
        """
        return self.weights.multiply(key, x)

    def cached_versions(self) -> set[int]:
        """Versions of the weights that made what is cached."""
        return self.prefixes.versions()

    def stored(self, name: str) -> dict[str, Tensor]:
        """See `Intake.stored`."""
        return self.intake.stored(name)

    def reads(self) -> Serving:
        """What the next call would read."""
        _, model = self._serving()
        captured = {} if self.graphs is None else self.graphs.reads
        return Serving(
            proved=proved_addresses(self.weights),
            read=read_addresses(model.weights) | captured,
            tables=model.rope,
            kv_cache=model.weights.plan.kv_cache,
            logits=model.logits,
            head_VD=self.weights.tensor(head_name(self.weights.spec)),
        )

    def operands(self) -> dict[str, Operand]:
        """What kernels read, by storage key, for a comparison in this process."""
        return self.weights.operands

    @torch.no_grad()
    def rederive(self, keys: Iterable[str]) -> None:
        """SyncError C3 naming tensors of `keys` whose operand is not what their codes give when derived again."""
        self.weights.verify(keys)

    def canonical_digests(self, names: Iterable[str]) -> dict[str, int]:
        """As `digest`, without a look at the operands."""
        return self.intake.canonical_digests(names)

    def begin(self, manifest: Manifest) -> None:
        """See `Intake.begin`."""
        self.intake.begin(manifest)

    def receive(self, bucket: Bucket) -> None:
        """See `Intake.receive`."""
        self.intake.receive(bucket)

    @torch.no_grad()
    def commit(self, version: int) -> float | None:
        """See `Intake.commit`. Prefixes of the version before are dropped."""
        share = self.intake.commit(version)
        self.prefixes.clear()
        return share

    @torch.no_grad()
    def abort(self) -> None:
        """See `Intake.abort`."""
        if self.intake.abort():
            self.prefixes.clear()

    @torch.no_grad()
    def digest(self, names: Iterable[str]) -> dict[str, int]:
        """See `Intake.digest`."""
        return self.intake.digest(names)

    def sleep(self) -> None:
        """Gives the key/value slots and prefixes back. Nothing is generated until `wake`."""
        self.cache = self.graphs = None
        self.prefixes.clear()

    @torch.no_grad()
    def wake(self) -> None:
        """Allocates the slots anew, after proof that every tensor is that of `version` (SyncError C2 or C3)."""
        self.intake.verify()
        if self.cache is None:
            self.cache = self._allocate()

    @property
    def _why_not(self) -> str:
        """Why decode steps are not captured; "" where they are."""
        if not self.config.capture:
            return "sampler.capture is false"
        return "" if self.weights.kernels.can_capture else f"{self.weights.kernels.name} kernels wait for the host"

    @property
    def _captures(self) -> bool:
        return not self._why_not

    def _allocate(self) -> Cache:
        spec, config, device = self.weights.spec, self.config, self.weights.device
        slots = round_up(config.max_slots, TILE) if self._captures else config.max_slots
        cache = Cache(spec, max_slots=slots, max_len=config.max_len, device=device)
        if self._captures:
            self.graphs = Graphs(cache, max_len=config.max_len, hidden_size=spec.hidden_size, device=device)
        return cache

    def _generation(self, model: Model, cache: Cache, requests: list[Request]) -> Generation:
        kind: Callable[..., Generation] = Generation
        if self.graphs is not None and can_capture(requests[0].sampling):
            kind = partial(CapturedGeneration, graphs=self.graphs)
        return kind(
            model,
            requests,
            cache=cache,
            prefixes=self.prefixes,
            max_slots=self.config.max_slots,
            decode_text=self.decode_text,
        )

    def _serving(self) -> tuple[Cache, Model]:
        version = self.version
        if version is None or not self.intake.serving:
            raise SyncError("no version of the weights is complete and proved; synchronize first", condition="C5")
        if self.cache is None:
            raise CapabilityError("the sampler sleeps; wake it first")
        return self.cache, Model(self.weights, self.rope, version, self.config.prefill_tokens)

    def _describe(self, name: str) -> Live:
        key = stack_key(name)
        canonical, operand = self.weights.canonical(name), self.weights.operands.get(key)
        place = f"row {self.weights.keys[key].index(name)} of {key}" if is_stack(key) else "own storage"
        return Live(
            format=format_of(canonical),
            shape=tuple(canonical.shape),
            kernel=self._kernel(key, operand),
            layout=place if operand is None else f"{place}, values {tuple(operand.values.stride())}",
            activation=str(self.weights.activation[key] or "bf16"),
        )

    def _kernel(self, key: str, operand: Operand | None) -> str:
        if operand is not None:
            return f"{operand.kind} matmul of {operand.values.dtype} values"
        if not isinstance(self.weights.held[key], QuantTensor):
            return "read as is"
        packed = self.weights.packed is not None and self.weights.packed.parts(key)
        return f"{'packed matmul of few rows, else ' if packed else ''}codes decoded for each matmul"

    def _check(self, request: Request) -> None:
        sampling, spec = request.sampling, self.weights.spec
        who = f"prompt {request.prompt_index}, sample {request.sample}"
        if not request.prompt_tokens:
            raise CapabilityError(f"{who}: the prompt is empty; it needs one token at least")
        if not all(0 <= token < spec.vocab_size for token in request.prompt_tokens):
            raise CapabilityError(f"{who}: a prompt token lies outside the vocabulary of {spec.vocab_size}")
        check_sampling(sampling, who)
        needed = len(request.prompt_tokens) + sampling.max_new_tokens
        if needed > self.config.max_len:
            raise CapabilityError(
                f"{who}: {len(request.prompt_tokens)} prompt and up to {sampling.max_new_tokens} new tokens need "
                f"{needed} positions, a slot has {self.config.max_len}; raise max_len or lower max_new_tokens"
            )
        if truncates(sampling) and self.config.kept == "refuse":
            raise CapabilityError(
                f'{who}: top_p {sampling.top_p} or top_k {sampling.top_k} truncates, and kept = "refuse"; '
                "sample the whole distribution, or record the kept sets"
            )
        if sampling.stop_strings and self.decode_text is None:
            raise CapabilityError(f"{who}: stop strings need decode_text")
        if sampling.record_routing and not spec.moe_layers:
            raise CapabilityError(f"{who}: record_routing, but the model has no experts")
