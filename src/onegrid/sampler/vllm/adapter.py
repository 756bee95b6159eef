"""vLLM as a sampler: the whole protocol on a live engine, in this process or in one of its own.

Weights come as canonical bytes, are staged and proved as those of the embedded engine are (`sampler/intake.py`), and go
into the engine through its own reload functions, in place. What serves is then proved from the modules: see
`onegrid.sampler.vllm.verify`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from onegrid.errors import CapabilityError, SyncError
from onegrid.model.canonical import Snapshot, parts_of
from onegrid.model.spec import ModelSpec
from onegrid.model.stacks import is_stack
from onegrid.recipe import Plan
from onegrid.sampler.asked import check_prompts, check_sampling
from onegrid.sampler.base import Capabilities, Live
from onegrid.sampler.draw import stream, truncates
from onegrid.sampler.intake import Intake
from onegrid.sampler.rollouts import rollout_of
from onegrid.sampler.stops import DecodeText
from onegrid.sampler.vllm.config import VllmConfig
from onegrid.sampler.vllm.launch import Launched, launch
from onegrid.sampler.vllm.store import SharedStore
from onegrid.sampler.vllm.versions import check
from onegrid.types import Bucket, Manifest, Request, Rollout, Sampling

P = ParamSpec("P")
T = TypeVar("T")
_ROUNDING = 1.2e-4
"""Nats between two FP32 log-softmax of one row. In each: the sum over 152k tokens in blocks of 1024 is rounded some 160
times by 2^-24 of itself, and a logit of up to 256 three times."""


def _in_turn(method: Callable[Concatenate[VllmSampler, P], T]) -> Callable[Concatenate[VllmSampler, P], T]:
    """One call after another, whatever threads they come from: an engine that loads weights while it generates fails,
    or gives tokens of two versions under the name of one."""

    @functools.wraps(method)
    def wrapped(self: VllmSampler, *arguments: P.args, **named: P.kwargs) -> T:
        with self._turn:
            return method(self, *arguments, **named)

    return wrapped


class VllmSampler:
    """Follows `base.Sampler`.

    hf_config    the model's config.json as a dict; its quantization_config, if any, is replaced by the plan's
    max_len      positions of a sequence, prompt and response together
    max_slots    completions that run at once
    decode_text  token ids to text, for Rollout.text
    loaded       weights that the engine reads from `checkpoint` by itself; proved before the first token. None starts
                 with random ones and waits for a first commit
    checkpoint   folder that the engine loads, configuration and weights; None: made from `hf_config` and plan
    Raises CapabilityError where vLLM is missing or unknown, or cannot run the plan on this road; the message of vLLM
    is in it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hf_config: Mapping[str, Any],
        plan: Plan,
        config: VllmConfig,
        *,
        max_len: int,
        max_slots: int,
        decode_text: DecodeText | None = None,
        checkpoint: Path | None = None,
        loaded: Snapshot | None = None,
    ) -> None:
        self.spec, self.plan, self.config = spec, plan, config
        self._turn = threading.RLock()
        self.max_len, self.decode_text = max_len, decode_text
        self.engine_version = check(allow_unknown=config.allow_unknown_version)
        self.store = SharedStore(spec, plan)
        self.engine: Launched = launch(
            spec,
            hf_config,
            plan,
            config,
            folder=self.store.folder,
            checkpoint=checkpoint,
            max_len=max_len,
            max_slots=max_slots,
        )
        self.store.ask = self.engine.ask
        self.asleep = False
        self._canary: int | None = None
        self.intake = Intake(self.store, plan_digest=plan.digest)
        try:
            self._refuse_unknown_kernels()
            if loaded is not None:
                self.adopt_loaded(loaded)
        except BaseException:
            self.close()
            raise

    def adopt_loaded(self, loaded: Snapshot) -> None:
        """The weights that the engine has loaded by itself are those of a version, from here on.

        SyncError (C1 .. C3) naming every tensor that is not, byte for byte; nothing serves then.
        """
        for name, tensor in loaded.tensors.items():
            for part, live in self.store.parts(name).items():
                live.copy_(parts_of(tensor)[part])
        self.engine.ask("onegrid_remember")
        self.store.verify()
        self.intake = Intake(self.store, plan_digest=self.plan.digest, version=loaded.version)

    @property
    def version(self) -> int | None:
        """Version that serves."""
        return self.intake.version

    @property
    def capabilities(self) -> Capabilities:
        """Kept sets, routing and stop strings are refused; graphs exist where the engine captures some."""
        return Capabilities(
            bits=False,
            kept_set=False,
            routing=False,
            stop_strings=False,
            captured=self.engine.captures,
            formats=None,
        )

    @_in_turn
    def generate(
        self, requests: Sequence[Request], on_finished: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """See `base.Sampler.generate`; `on_finished` is told when the call is over.

        All tokens are of the version that serves: no request overlaps a synchronization.

        CapabilityError for what cannot be done, before anything runs; NonFiniteError naming a request whose
        log-probabilities are not finite; SyncError where no proved version is there.
        """
        for request in requests:
            self._check(request)
        version = self._serving()
        self.intake.settle()
        outputs = self.engine.complete(
            [list(request.prompt_tokens) for request in requests], [self._parameters(request) for request in requests]
        )
        rollouts = [self._rollout(*pair, version) for pair in zip(requests, outputs, strict=True)]
        for rollout in rollouts if on_finished is not None else ():
            on_finished(rollout)  # type: ignore[misc]
        return rollouts

    @_in_turn
    def probe(self, prompts: Sequence[Sequence[int]], captured: bool = False) -> list[Tensor]:
        """FP32 [V] log-probabilities, at temperature 1, of the token after each prompt. Does not count as serving.

        They come from the logits of the engine's own forward, prompt by prompt, and are held to what the engine says of
        the token that it samples: SyncError (C4) where the two are apart. NaN and Inf stay what they are.
        """
        self._serving()
        check_prompts(prompts, self.spec.vocab_size, self.max_len - 1)
        if captured and not self.engine.captures:
            raise CapabilityError("this engine captures no graphs; probe with captured=False")
        wanted = {"temperature": 1.0, "max_tokens": 1, "logprobs": 0, "seed": 0, "ignore_eos": True}
        with self.engine.without_graphs() if self.engine.captures and not captured else contextlib.nullcontext():
            return [self._log_probs(*self.engine.complete_with_logits(prompt, wanted)) for prompt in prompts]

    @_in_turn
    def describe(self) -> dict[str, Live]:
        """Every canonical tensor, from the engine's modules, kernels and storage."""
        answer = self.engine.ask("onegrid_describe", True)
        return {name: Live(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in answer.items()}

    @_in_turn
    def multiply(self, key: str, x: Tensor) -> Tensor:
        """What the live kernel of one linear makes of `x` [M, K], in `x`'s dtype.

        CapabilityError for stacked experts: vLLM runs gate, up and down of an expert in one kernel.
        """
        if is_stack(key):
            raise CapabilityError(f"{key}: experts are one kernel in vLLM, and their products cannot be asked for")
        return self.engine.multiply(key, x)

    @_in_turn
    def cached_versions(self) -> set[int]:
        """Versions of the weights that made what the engine's prefix cache holds, found by asking for a known prompt.

        The first time after a commit, a prompt that the version before has computed must not be found in the cache.
        """
        version = self._serving()
        if self._canary == version:
            return {version}
        before, self._canary = self._canary, version
        if not self.engine.canary():
            return {version}
        return {version, -1 if before is None else before}

    def stored(self, name: str) -> dict[str, Tensor]:
        """See `Intake.stored`."""
        return self.intake.stored(name)

    def begin(self, manifest: Manifest) -> None:
        """See `Intake.begin`."""
        self._refuse_dead()
        self.intake.begin(manifest)

    def receive(self, bucket: Bucket) -> None:
        """See `Intake.receive`."""
        self.intake.receive(bucket)

    @_in_turn
    def commit(self, version: int) -> float | None:
        """See `Intake.commit`. Prefixes of the version before are dropped."""
        if self.asleep:
            raise CapabilityError("the sampler sleeps; wake it before a synchronization")
        try:
            return self.intake.commit(version)
        finally:
            self.engine.reset_prefix_cache()

    @_in_turn
    def abort(self) -> None:
        """See `Intake.abort`."""
        if self.intake.abort():
            self.engine.reset_prefix_cache()

    @_in_turn
    def digest(self, names: Iterable[str]) -> dict[str, int]:
        """Digests of the canonical bytes, after proof that what every kernel reads follows from them (C3, C4)."""
        return self.intake.digest(names)

    @_in_turn
    def sleep(self) -> None:
        """Gives memory back as far as the engine can (sleep_level). Nothing is generated until `wake`."""
        self.engine.reset_prefix_cache()
        self.engine.sleep()
        self.asleep = True

    @_in_turn
    def wake(self) -> None:
        """Serves again, after weights are back and proved to be those of `version`."""
        if self.engine.wake():
            self.store.derive()
        self.intake.verify()
        self.asleep = False

    @_in_turn
    def close(self) -> None:
        """Ends the engine and gives everything back."""
        self.engine.close()
        self.store.close()

    def _refuse_unknown_kernels(self) -> None:
        """What nobody can audit does not start, unless the configuration says so."""
        told = self.engine.ask("onegrid_describe", False)
        unknown = {name: entry["kernel"] for name, entry in told.items() if entry["activation"] is None}
        if unknown and not self.config.allow_unknown_kernel:
            name, kernel = next(iter(unknown.items()))
            raise CapabilityError(
                f"{len(unknown)} tensors are read by kernels whose handling of inputs this adapter does not know, the "
                f"first: {name} by {kernel}; set sampler.vllm.allow_unknown_kernel = true to serve with them"
            )

    def _refuse_dead(self) -> None:
        if self.engine.dead:
            self.engine.reset_prefix_cache()  # says what has happened

    def _serving(self) -> int:
        self._refuse_dead()
        if self.version is None or not self.intake.serving:
            raise SyncError("no version of the weights is complete and proved; synchronize first", condition="C5")
        if self.asleep:
            raise CapabilityError("the sampler sleeps; wake it first")
        return self.version

    def _check(self, request: Request) -> None:
        sampling = request.sampling
        who = f"prompt {request.prompt_index}, sample {request.sample}"
        check_sampling(sampling, who)
        needed = len(request.prompt_tokens) + sampling.max_new_tokens
        for wrong, told in (
            (not request.prompt_tokens, "the prompt is empty; it needs one token at least"),
            (
                not all(0 <= token < self.spec.vocab_size for token in request.prompt_tokens),
                f"a prompt token lies outside the vocabulary of {self.spec.vocab_size}",
            ),
            (needed > self.max_len, f"prompt and response need {needed} positions, the engine has {self.max_len}"),
            (truncates(sampling), "top_p or top_k truncates, and vLLM does not tell the kept set"),
            (bool(sampling.stop_strings), "stop strings are not matched as the embedded engine does; use stop ids"),
            (sampling.record_routing, "this adapter does not record routing"),
            (
                self.config.logprobs == "raw" and sampling.temperature not in (0.0, 1.0),
                f"raw log-probabilities are those of temperature 1, not {sampling.temperature}",
            ),
        ):
            if wrong:
                raise CapabilityError(f"{who}: {told}")

    def _log_probs(self, output: Any, logits_V: Tensor) -> Tensor:
        """Of the whole vocabulary, without what pads it."""
        vocab = self.spec.vocab_size
        if len(logits_V) < vocab:
            raise CapabilityError(f"the engine has logits of {len(logits_V)} tokens, the model {vocab}")
        logp_V = logits_V[:vocab].float().log_softmax(-1)
        done = output.outputs[0]
        token = done.token_ids[0]
        told = done.logprobs[0][token].logprob
        if bool(logp_V.isfinite().all()) and not (token < vocab and abs(float(logp_V[token]) - told) <= _ROUNDING):
            found = f"{float(logp_V[token])}" if token < vocab else f"none, of {vocab} tokens"
            raise SyncError(
                f"the engine samples from other numbers than its model computes: token {token} has log-probability "
                f"{told} by the engine and {found} by the logits of its model",
                condition="C4",
            )
        return logp_V

    def _parameters(self, request: Request) -> dict[str, Any]:
        sampling: Sampling = request.sampling
        return {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # the stop tokens of the request are all there are
            "logprobs": 0,
            "seed": stream(request) & (2**63 - 1),
        }

    def _rollout(self, request: Request, output: Any, version: int) -> Rollout:
        done = output.outputs[0]
        tokens = list(done.token_ids)
        logps = [entry[token].logprob for entry, token in zip(done.logprobs, tokens, strict=True)]
        return rollout_of(request, tokens, logps, version=version, decode_text=self.decode_text)
