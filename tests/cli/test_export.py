"""A trained checkpoint opens elsewhere and answers the same."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.config import load_config
from onegrid.errors import CheckpointError, ConfigError, WeightsError
from onegrid.model.live import LiveWeights
from onegrid.rl.batch import make_requests
from onegrid.rl.checkpoint import load
from onegrid.rl.loop import snapshot
from onegrid.rl.tokenizer import load_tokenizer
from onegrid.sampler.engine import Engine
from onegrid.study.parts import build, design
from onegrid.sync import push
from onegrid.types import Sampling
from tests.bytes import assert_same_bytes
from tests.rl.tiny import write_tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps in BF16."""
    folder = tmp_path_factory.mktemp("run")
    arguments = ["train", str(write_tiny_run(folder)), "recipe.preset=bf16", "--run-dir", str(folder / "out")]
    assert CliRunner().invoke(app, [*arguments, "--steps", "3"], catch_exceptions=False).exit_code == 0
    return folder


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)


def test_transformers_gives_the_same_greedy_answers_as_the_sampler(run, tmp_path):
    from transformers import AutoModelForCausalLM

    assert export(run / "out", tmp_path / "hf").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    plan = design(load_config(run / "out" / "config.toml", [f"model.checkpoint={tmp_path / 'hf'}"]), tmp_path)
    parts = build(plan)
    sampler = Engine(LiveWeights(plan.spec, plan.plan, side="sampler", device="cpu"), plan.config.sampler)
    push(snapshot(parts.learner), sampler)
    prompts = parts.task.held_out(12)
    greedy = Sampling(temperature=0.0, max_new_tokens=6)
    for rollout in sampler.generate(make_requests(prompts, 1, seed=0, sampling=greedy)):
        prompt = torch.tensor([rollout.request.prompt_tokens])
        with torch.no_grad():
            logits_RV = model(torch.cat([prompt[0], rollout.tokens_R])[None]).logits[0, prompt.shape[1] - 1 : -1]
        top = logits_RV.topk(2).values
        clear_R = top[:, 0] - top[:, 1] > 0.1  # BF16 keeps 8 bits of sums here of about 1: nearer ones may swap
        assert torch.equal(logits_RV.argmax(-1)[clear_R], rollout.tokens_R[clear_R])
        assert clear_R.any()


def test_the_weights_are_those_that_were_trained_and_the_tokenizer_comes_along(run, tmp_path):
    step = run / "out" / "checkpoints" / "global_step_2"
    export(step, tmp_path / "hf")
    plan = design(load_config(run / "out" / "config.toml", [f"model.checkpoint={tmp_path / 'hf'}"]), tmp_path)
    exported = build(plan).learner
    for key, master in load(step)["learner"]["masters"].items():
        assert_same_bytes(exported.masters[key].detach(), master.to(torch.bfloat16).float(), key)
    assert load_tokenizer(tmp_path / "hf").encode("1+2=") == load_tokenizer(run / "model").encode("1+2=")


def test_an_export_is_refused_where_it_would_destroy_or_has_nothing_to_say(run, tmp_path):
    with pytest.raises(WeightsError, match="is not empty"):
        export(run / "out", run / "model")
    with pytest.raises(ConfigError, match="already"):
        export(run / "model", tmp_path / "hf")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        export(tmp_path, tmp_path / "hf")
