"""From a configuration to the parts of one run: model, plan, task, learner and sampler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from onegrid.config import RunConfig
from onegrid.errors import ConfigError
from onegrid.guard.guard import Guard
from onegrid.learner.config import LearnerConfig
from onegrid.learner.learner import Learner
from onegrid.learner.lora import targeted
from onegrid.model.live import LiveWeights
from onegrid.model.shards import read_object
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import load_weights, read_index
from onegrid.ops.memory import keep_freed_memory
from onegrid.ops.selftest import Proof, require, self_test
from onegrid.ops.table import Kernels
from onegrid.recipe import Plan, preset, recipe_from_dict, resolve
from onegrid.rl.debug import from_folder
from onegrid.rl.loop import train
from onegrid.rl.problems import at_folder, make_task
from onegrid.rl.progress import Display
from onegrid.rl.record import Record
from onegrid.rl.stop import Stop
from onegrid.rl.tasks import Prompt, Task, Tokenizer
from onegrid.rl.tokenizer import load_tokenizer, stop_tokens
from onegrid.sampler.base import Sampler
from onegrid.study.samplers import make_sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """What a run is, known before any weight is read."""

    config: RunConfig
    """Resolved: device, stop tokens and the folder of the model are filled in."""
    hf_config: dict[str, Any]
    spec: ModelSpec
    plan: Plan
    reference_plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What `rl.loop.train` works with."""

    task: Task
    tokenizer: Tokenizer
    learner: Learner
    sampler: Sampler
    reference: Learner | None
    proof: Proof
    """That rows are independent on this device; an exact plan is refused without it."""
    matmuls: list[dict[str, Any]]
    """What was measured, and taken, for matmuls of few rows: `ops.matmul_choice`."""


def train_parts(
    parts: Parts,
    config: RunConfig,
    *,
    guard: Guard,
    record: Record,
    display: Display,
    state: dict[str, Any] | None = None,
    stop: Stop | None = None,
) -> None:
    """`rl.loop.train` on what was built, by a resolved configuration (`Design.config`). Raises what that raises."""
    train(
        parts.task,
        parts.learner,
        parts.sampler,
        guard=guard,
        config=config.loop,
        sampling=config.sampling,
        seed=config.seed,
        tokenizer=parts.tokenizer,
        record=record,
        display=display,
        dynamic=config.dynamic,
        correction=config.correction,
        evaluation=config.eval,
        checkpoints=config.checkpoint,
        reference=parts.reference,
        state=state,
        stop=stop,
        replay=Path(config.debug.train_only) if config.debug.train_only else None,
    )


def design(config: RunConfig, base: Path) -> Design:
    """Read the model's shapes and resolve recipe and configuration.

    base  where relative names in the configuration start
    Raises ConfigError, SpecError, WeightsError or RecipeError.
    """
    folder = (base / config.model.checkpoint).resolve()
    if not (folder / "config.json").exists():
        raise ConfigError(f"model.checkpoint is {config.model.checkpoint!r}, but {folder} has no config.json")
    device = find_device(config.device)
    sampling = config.sampling
    if not sampling.stop_token_ids:
        sampling = replace(sampling, stop_token_ids=stop_tokens(folder))
    hf_config = read_object(folder / "config.json")
    index = read_index(folder)
    plan = resolve(recipe_from_dict(config.recipe), hf_config, index)
    bf16 = resolve(preset("bf16"), hf_config, index)
    spec = ModelSpec.from_hf_config(hf_config)
    beyond = [i for i in sampling.stop_token_ids if not 0 <= i < spec.vocab_size]
    if beyond:
        where = "sampling.stop_token_ids" if config.sampling.stop_token_ids else f"eos_token_id of {folder}"
        raise ConfigError(
            f"{where} has {beyond}, which no token can be: the model's ids are 0 .. {spec.vocab_size - 1}"
        )
    return Design(
        config=replace(
            config,
            model=replace(config.model, checkpoint=str(folder)),
            device=device,
            sampling=sampling,
            task=at_folder(config.task, base),
            learner=_adapted(config.learner, spec, base),
            debug=from_folder(config.debug, base),
        ),
        hf_config=hf_config,
        spec=spec,
        plan=plan,
        reference_plan=plan if plan.reference == "plan" else bf16,
    )


def _adapted(config: LearnerConfig, spec: ModelSpec, base: Path) -> LearnerConfig:
    """The targets of adapters fit the model, and the folder to go on from is a whole path."""
    if config.lora is None:
        return config
    targeted(config.lora.targets, spec)
    folder = str((base / config.lora.adapter).resolve()) if config.lora.adapter else ""
    return replace(config, lora=replace(config.lora, adapter=folder))


def find_device(name: str) -> str:
    """The device that a name means, "auto" included. Raises ConfigError for one that is not there.

    A process sees its own GPU as the first: kernels and captures of torch and Triton go to the current device of a
    thread, whatever device their tensors are on.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    gpus = ["cuda", "cuda:0"] if torch.cuda.is_available() else []
    if name not in ("cpu", *gpus):
        another = ""
        if gpus and name.startswith("cuda:"):
            another = f"; for another GPU set CUDA_VISIBLE_DEVICES={name[5:]} and device cuda"
        raise ConfigError(f"device is {name!r}; here it can be auto, {', '.join(('cpu', *gpus))}{another}")
    return name


def build(design: Design) -> Parts:
    """Load the weights and make both sides. Raises WeightsError or NonFiniteError for weights that do not fit."""
    config, spec = design.config, design.spec
    if config.device == "cpu":
        keep_freed_memory()
    tokenizer, task = problems(design)
    weights = load_weights(Path(config.model.checkpoint), spec)

    def learner(plan: Plan, settings: LearnerConfig) -> Learner:
        return Learner(spec, plan, weights, settings, loss=config.loss, device=config.device)

    asked = bool(config.loop.reference_every)
    live = LiveWeights(spec, design.plan, side="sampler", device=config.device, weights=config.sampler.weights)
    proof = prove_pins(
        spec, live.kernels, config.device, max_tokens=config.learner.max_tokens, native=live.native_shapes()
    )
    if design.plan.exact:
        require(proof)
    return Parts(
        task=task,
        tokenizer=tokenizer,
        learner=learner(design.plan, config.learner),
        sampler=make_sampler(config.sampler, live, proof, decode_text=tokenizer.decode),
        reference=learner(design.reference_plan, replace(config.learner, lora=None)) if asked else None,
        proof=proof,
        matmuls=[asdict(choice) for choice in live.choices],
    )


def problems(design: Design) -> tuple[Tokenizer, Task]:
    """Tokenizer and task, which need no weights. Raises ConfigError for a tokenizer of another model, and TaskError."""
    config, spec = design.config, design.spec
    folder = Path(config.model.checkpoint)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} ids, the model {spec.vocab_size}: its prompts could "
            "hold ids without an embedding; use the tokenizer that belongs to the model"
        )
    return tokenizer, make_task(config.task, tokenizer, num_prompts=config.loop.prompts_per_step, seed=config.seed)


def draw_once(task: Task, config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """The problems of the first step and those of the evaluation, so that a lack of them shows before a run begins.

    Raises TaskError if there are too few of either. A half run has no evaluation, and one that only learns no problems.
    """
    first = [] if config.debug.train_only else task.prompts(1)
    half = config.debug.rollouts_only or bool(config.debug.train_only)
    return first, [] if half else task.held_out(config.eval.num_problems)


def prove_pins(
    spec: ModelSpec,
    kernels: Kernels,
    device: str,
    *,
    max_tokens: int = 512,
    native: Mapping[str, Iterable[tuple[int, ...]]] = MappingProxyType({}),
) -> Proof:
    """The start-up proof for the shapes of a model: on a GPU up to the largest micro-batch, on a CPU up to 512 rows.

    native  shapes by kind of operand where products are native, as `LiveWeights.native_shapes` gives them
    """
    every = tensor_shapes(spec)
    shapes = {name: shape for name, shape in every.items() if name.endswith("_proj.weight")}
    return self_test(
        {(out, width) for name, (out, width) in shapes.items() if ".experts." not in name},
        stacked={(out, width) for name, (out, width) in shapes.items() if ".experts." in name},
        heads=(spec.num_heads, spec.num_kv_heads, spec.head_dim),
        routers={(shape[0], shape[1]) for name, shape in every.items() if name.endswith(".mlp.gate.weight")},
        native=native,
        vocabulary=spec.vocab_size,
        hidden=spec.hidden_size,
        max_rows=max(512, max_tokens) if device.startswith("cuda") else 512,
        device=device,
        kernels=kernels,
    )
