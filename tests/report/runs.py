"""Run directories as a training leaves them, written in a moment: whole, hostile or cut short."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.recipe import preset, resolve
from onegrid.rl.characters import CharacterTokenizer
from onegrid.rl.record import Incident, Record
from onegrid.rl.tokenizer import save_tokenizer
from onegrid.types import Group, Problem, Request, Rollout, Sampling
from tests.rl.tiny import CONFIG

CHECKS = ("bytes", "audit", "transaction", "digest", "selfcheck", "probe", "freshness", "sentinel")
TOKENS = 96
"""Compared in each step."""


def line(step: int, rng: random.Random) -> dict[str, Any]:
    """Metrics of one step, with the keys of a real run."""
    rollout, update = 0.2 + 0.1 * rng.random(), 0.4 + 0.1 * rng.random()
    return {
        "rollout/raw_reward": 1 - math.exp(-step / 8) + 0.01 * rng.random(),
        "rollout/response_length": 3 + rng.random(),
        "rollout/response_length_min": 2.0,
        "rollout/response_length_max": 5.0,
        "rollout/truncated_share": 0.25 * rng.random(),
        "rollout/constant_groups": 0.25,
        "train/entropy": 1 / (1 + step) + 0.01 * rng.random(),
        "train/grad_norm": 1 + rng.random(),
        "train/grad_norm/embed_tokens": rng.random(),
        "train/grad_norm/layers.0": rng.random(),
        "train/grad_norm/layers.1": rng.random(),
        "train/lr": 1e-4,
        "mismatch/max_abs": 0.0,
        "mismatch/p99": 0.0,
        "mismatch/kl": 0.0,
        "mismatch/share_equal": 1.0,
        "mismatch/tokens": TOKENS,
        "perf/rollout_seconds": rollout,
        "perf/update_seconds": update,
        "perf/step_seconds": rollout + update + 0.05,
        "perf/rollout_tokens_per_second": 1000 * rng.random() + 500,
        **{f"guard/{check}": 1 for check in CHECKS},
    }


def accuracy(value: float, problems: int = 256) -> dict[str, float]:
    """Held-out metrics with an interval."""
    key = "eval/held_out/"
    return {
        key + "accuracy": value,
        key + "accuracy_low": value - 0.03,
        key + "accuracy_high": value + 0.04,
        key + "problems": float(problems),
    }


def write_run(
    folder: Path,
    *,
    num_steps: int = 12,
    done: int | None = None,
    recipe: str = "mxfp8",
    seed: int = 0,
    texts: tuple[str, str] = ("1+2=", "3"),
    change: Callable[[int, dict[str, Any]], None] | None = None,
) -> Path:
    """A run of so many steps of which `done` are done; `change` may alter the line of a step."""
    rng = random.Random(seed)
    record = Record(folder)
    model = folder.parent / "model"
    model.mkdir(exist_ok=True)
    save_tokenizer(CharacterTokenizer(), model)
    record.text(
        "config.toml",
        f'seed = {seed}\ndevice = "cpu"\n[model]\ncheckpoint = {json.dumps(str(model))}\n'
        f'[recipe]\npreset = "{recipe}"\n[guard]\noff = []\n[loop]\nnum_steps = {num_steps}\n',
    )
    plan = resolve(preset(recipe), CONFIG, tensor_shapes(ModelSpec.from_hf_config(CONFIG)))
    record.text("plan.json", plan.to_json())
    pins = {"passed": True, "failed": [], "operations": 7}
    versions = {"onegrid": "0.1.0", "torch": "2.13.0", "python": "3.11", "cpu": "AVX2", "threads": "1", "gpu": "none"}
    record.text("versions.json", json.dumps(versions | {"pins": pins}))
    record.metrics(0, accuracy(0.25))
    for step in range(1, (num_steps if done is None else done) + 1):
        metrics = line(step, rng)
        if step == num_steps:
            metrics |= accuracy(0.75)
        if change:
            change(step, metrics)
        record.metrics(step, metrics)
        if step % 4 == 0 or num_steps < 8:
            record.rollouts(step, rollouts(step, rng, texts[1]), lambda ids: texts[0])
    return folder


def rollouts(step: int, rng: random.Random, text: str) -> list[Group]:
    """Two groups of three, of which only the first has different rewards."""
    groups = []
    for group in range(2):
        members = []
        for sample in range(3):
            ids = [3 + rng.randrange(10) for _ in range(3)] + [2]
            members.append(
                Rollout(
                    request=Request(prompt_index=group, sample=sample, prompt_tokens=(4,), seed=0, sampling=Sampling()),
                    tokens_R=torch.tensor(ids),
                    logp_R=torch.tensor([-rng.random() * 4 for _ in ids]),
                    version_R=torch.tensor([step - 1] * 2 + [step] * 2),
                    finish="stop",
                    text=text,
                    reward=float(sample % 2) if group == 0 else None if sample else 1.0,
                    scored=True,
                )
            )
        problem = Problem(data_source="made", ground_truth=f"{text}\n#### {group}")
        groups.append(Group(group_id=group, rollouts=tuple(members), problem=problem))
    return groups


def add_incident(folder: Path, *, step: int, check: str = "digest", text: str = "row 12") -> None:
    """A line of incidents.jsonl, as a check that stopped the run leaves it."""
    incident = Incident(
        step=step,
        version=step - 1,
        check=check,
        condition="C2",
        tensors=("model.layers.1.mlp.experts.3.down_proj.weight",),
        expected="the learner's codes",
        found=text,
        likely_cause="one byte changed on the way",
        action="the run stopped; the version before keeps serving",
    )
    fields = {name: getattr(incident, name) for name in Incident.__slots__}
    with open(folder / "incidents.jsonl", "a") as file:
        file.write(json.dumps(fields | {"tensors": list(incident.tensors)}) + "\n")
