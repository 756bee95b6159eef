"""An engine of vLLM, started for a plan, and the few things the adapter asks of it.

The only file that imports vLLM outside its worker. vLLM reads the environment when it starts; what it needs is set here
and put back.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from onegrid.errors import CapabilityError, ConfigError, SyncError
from onegrid.model.spec import ModelSpec
from onegrid.recipe import Plan
from onegrid.sampler.vllm.config import VllmConfig
from onegrid.sampler.vllm.wire import Quantization, quantization_of

T = TypeVar("T")
WORKER = "onegrid.sampler.vllm.worker.OnegridWorker"
BLOCK = 32
"""Positions that share a place in the prefix cache; the smallest that vLLM's CPU kernels like."""

_HERE: list[Any] = []
"""Engines in this process. They share vLLM's process groups, which the end of one takes from the others, so only the
last one is shut down; those before it are let go."""


def launch(
    spec: ModelSpec,
    hf_config: Mapping[str, Any],
    plan: Plan,
    config: VllmConfig,
    *,
    folder: Path,
    checkpoint: Path | None,
    max_len: int,
    max_slots: int,
) -> Launched:
    """Start vLLM. CapabilityError with its message where it refuses; ConfigError for sizes that no model has."""
    if max_len > spec.max_positions:
        raise ConfigError(f"max_len {max_len} is beyond the model's {spec.max_positions} positions")
    own = checkpoint is not None and config.road != "online"  # a checkpoint says itself what it is
    quantization = Quantization() if own else quantization_of(plan, config.road)
    model = checkpoint
    if model is None:
        model = folder / "model"
        model.mkdir()
        told = {k: v for k, v in hf_config.items() if k not in ("quantization_config", "compression_config")}
        told |= {"architectures": spec.to_hf_config()["architectures"]} if "architectures" not in told else {}
        told |= quantization.checkpoint
        (model / "config.json").write_text(json.dumps(told), encoding="utf-8")
    with _environment(VLLM_ENABLE_V1_MULTIPROCESSING="1" if config.apart else "0", VLLM_LOGGING_LEVEL="ERROR"):
        try:
            import vllm
        except ImportError as error:
            raise CapabilityError(f"vLLM cannot be imported: {error}") from error
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if config.sleep_level and on_cpu:
            raise CapabilityError("vLLM ignores sleep on a CPU; set sampler.vllm.sleep_level = 0")
        if config.emulate:
            from onegrid.sampler.vllm.emulation import register

            register()
        arguments: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": config.dtype,
            "enforce_eager": config.eager,
            "max_model_len": max_len,
            "max_num_seqs": max_slots,
            "kv_cache_memory_bytes": config.kv_cache_bytes,
            "kv_cache_dtype": "fp8" if plan.kv_cache == "fp8" else "auto",
            "enable_prefix_caching": config.prefix_cache,
            "generation_config": "vllm",
            "logprobs_mode": f"{config.logprobs}_logprobs",
            "block_size": BLOCK,
            "load_format": "dummy" if checkpoint is None else "auto",
            "worker_extension_cls": WORKER,
            "enable_sleep_mode": config.sleep_level > 0,
            "disable_log_stats": True,
            "trust_remote_code": False,
            "seed": 0,
            **quantization.arguments,
            **config.arguments,
        }
        try:
            engine = vllm.LLM(**arguments)
        except Exception as error:
            hint = _EMULATE if on_cpu and not config.emulate and "kernel" in str(error) else ""
            raise CapabilityError(
                f"vLLM does not start with this plan and configuration: {reason(error)}{hint}"
            ) from error
    launched = Launched(engine, config, folder=folder, max_len=max_len, on_cpu=on_cpu)
    launched.ask("onegrid_open", str(folder), config.road, spec.to_hf_config(), plan.to_json())
    (folder / "canonical").unlink()  # both sides have it mapped; a process that is killed leaves no memory behind
    return launched


class Launched:
    """A running engine."""

    def __init__(self, engine: Any, config: VllmConfig, *, folder: Path, max_len: int, on_cpu: bool) -> None:
        self.engine: Any = engine
        self.config, self.folder, self.max_len, self.on_cpu = config, folder, max_len, on_cpu
        self.captures = not (config.eager or on_cpu)
        self.dead = False
        """The engine had a process of its own, which has ended."""
        if not config.apart:
            _HERE.append(engine)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Answer of the worker's method; everything that crosses is plain data."""
        return self._call(lambda: self.engine.collective_rpc(method, args=arguments)[0])

    def _call(self, call: Callable[[], T]) -> T:
        """What `call` gives. SyncError (C5) where the engine's process has ended, from then on at once."""
        told = SyncError(
            "the engine's process has ended, killed or out of memory, and nothing serves; start the run anew: it goes "
            "on from its last checkpoint",
            condition="C5",
        )
        if self.dead:
            raise told
        try:
            return self._watched(call) if self.config.apart else call()
        except Exception as error:  # vLLM tells it in many ways, some of them assertions
            self.dead = self._has_ended()
            if self.dead:
                raise told from error
            raise

    def _watched(self, call: Callable[[], T]) -> T:
        """The call in a thread, until it ends or the engine does: vLLM 0.32 waits without end for a dead core."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True, name="vllm-call").start()
        while not wait([future], timeout=1.0).done:
            if self._has_ended():
                raise SyncError("the engine has ended while it was asked", condition="C5")
        return future.result()

    def _has_ended(self) -> bool:
        """Whether the process of the engine's core is gone, as vLLM has noticed."""
        resources = getattr(self.engine.llm_engine.engine_core, "resources", None)
        return bool(getattr(resources, "engine_dead", False))

    def complete(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Mapping[str, Any]]) -> list[Any]:
        """One output of vLLM per prompt, in their order."""
        from vllm import SamplingParams

        if not prompts:
            return []
        try:
            return self._call(
                lambda: self.engine.generate(
                    [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                    [SamplingParams(detokenize=False, **p) for p in parameters],
                    use_tqdm=False,
                )
            )
        except BaseException as error:
            if self.dead:
                raise
            self._abort_all()
            if isinstance(error, Exception):
                raise CapabilityError(f"vLLM failed while it generated: {reason(error)}") from error
            raise

    def _abort_all(self) -> None:
        """Leaves no request of a call that was interrupted in the engine, whose answers would come with the next."""
        engine = self.engine.llm_engine
        waiting = list(engine.output_processor.request_states)
        if waiting:
            engine.abort_request(waiting, internal=True)  # by the engine's own names; others it would pass over

    def reset_prefix_cache(self) -> None:
        """Asks the engine to drop its prefix cache. Whether it did is for `canary` to find out."""
        self._call(lambda: self.engine.reset_prefix_cache())

    def canary(self) -> bool:
        """Whether the engine finds a fixed prompt in its prefix cache; afterwards the prompt is in it."""
        if not self.config.prefix_cache or self.max_len < BLOCK + 2:
            return False  # only whole blocks are shared, and no prompt is longer than one
        prompt = [(3 * i + 1) % 7 for i in range(BLOCK + 1)]
        output = self.complete([prompt], [{"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}])[0]
        return bool(output.num_cached_tokens)

    def multiply(self, key: str, x: Tensor) -> Tensor:
        """See `VllmSampler.multiply`. The two matrices travel through the shared folder."""
        path = self.folder / "exchange"
        save(path, x)
        self.ask("onegrid_multiply", key)
        try:
            return load(path).to(x.device)
        finally:
            path.unlink(missing_ok=True)

    def complete_with_logits(self, prompt: Sequence[int], parameters: Mapping[str, Any]) -> tuple[Any, Tensor]:
        """One output of vLLM, and the logits [V] that its one token was sampled from, as the model computed them."""
        path = self.folder / "exchange"
        self.ask("onegrid_keep_logits")
        try:
            try:
                output = self.complete([prompt], [parameters])[0]
            finally:
                shape = self.ask("onegrid_kept_logits")
            if len(shape) != 2 or shape[0] != 1:
                raise CapabilityError(f"one prompt gave logits of shape {shape}; one row is expected")
            return output, load(path)[0]
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Runs the engine's forward without captured graphs inside. Not run here: it takes a GPU."""
        self.ask("onegrid_graphs", False)
        try:
            yield
        finally:
            self.ask("onegrid_graphs", True)

    def sleep(self) -> None:
        """Gives memory back where the engine can."""
        if self.config.sleep_level:
            self.engine.sleep(level=self.config.sleep_level)

    def wake(self) -> bool:
        """True where weights have to be loaded again."""
        if self.config.sleep_level:
            self.engine.wake_up()
        return self.config.sleep_level == 2

    def close(self) -> None:
        """Ends the engine and its processes."""
        if self.engine is None:
            return
        engine, self.engine = self.engine, None
        if self.config.apart:
            engine.llm_engine.engine_core.shutdown()
            return
        _HERE[:] = [other for other in _HERE if other is not engine]
        core = engine.llm_engine.engine_core
        at_exit = getattr(core, "_finalizer", None)
        if _HERE and at_exit is not None:
            at_exit.detach()
        elif not _HERE:
            core.shutdown()
        gc.unfreeze()  # vLLM hides what it has allocated at its start from the collector
        gc.collect()


_EMULATE = " (on a CPU, MXFP8 and NVFP4 run emulated: sampler.vllm.emulate = true, or `onegrid audit --emulate`)"


def reason(error: BaseException) -> str:
    """Type and text of an exception, or where it was raised: vLLM has bare `raise NotImplementedError` and `assert`."""
    text = str(error).strip()
    if not text:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"no reason given, raised by {last.name} in {last.filename}, line {last.lineno}"
    return f"{type(error).__name__}: {text}"


def save(path: Path, x: Tensor) -> None:
    """Dtype, shape and bytes of a tensor, as safetensors."""
    from safetensors.torch import save_file

    save_file({"x": x.detach().cpu().contiguous()}, str(path))


def load(path: Path) -> Tensor:
    """What `save` wrote."""
    from safetensors.torch import load_file

    return load_file(str(path))["x"]


@contextlib.contextmanager
def _environment(**wanted: str) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update({key: value for key, value in wanted.items() if key != "VLLM_LOGGING_LEVEL" or not before[key]})
    threads = torch.get_num_threads()
    set_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_threads  # vLLM puts a function in its place that does nothing
        torch.set_num_threads(threads)
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
