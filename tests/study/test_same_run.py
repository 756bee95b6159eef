"""A run goes on only as the run that it was: with its weights, its problems, and settings that change neither."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from onegrid.cli.train import run
from onegrid.errors import CheckpointError
from onegrid.rl.out_of_memory import ADVICE
from onegrid.rl.record import read_metrics
from onegrid.study.same_run import MEMORY
from tests.rl.data_files import gsm8k_rows, write_jsonl
from tests.rl.tiny import write_tiny_run


def train(folder, *overrides, steps=1, resume=False):
    """`onegrid train` on files, as a function."""
    settings = [
        "task.name=dataset",
        "task.digits=2",
        f'task.data.files=["{folder / "mine.jsonl"}"]',
        "eval.num_problems=2",
    ]
    settings += ['task.data.chat="plain"', "task.scoring.workers=0"]
    run(
        folder / "run.toml",
        [*settings, *overrides],
        run_dir=folder / "run",
        num_steps=steps,
        resume=resume,
        dry_run=False,
    )


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a run of one step on files."""
    folder = tmp_path_factory.mktemp("begun")
    write_tiny_run(folder)
    write_jsonl(folder / "mine.jsonl", gsm8k_rows(30))
    train(folder)
    return folder


@pytest.fixture
def again(begun, tmp_path):
    """A copy of it, under the names that its configuration has."""
    kept = tmp_path / "kept"
    shutil.copytree(begun, kept)
    yield begun
    shutil.rmtree(begun)
    shutil.copytree(kept, begun)


def test_other_weights_under_the_same_name_are_refused(again):
    path = again / "model" / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    weights["model.norm.weight"][0] += 1  # the checkpoint has its own, but the policy of the start is compared with
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"^model\.checkpoint are not what .* was begun with"):
        train(again, steps=2, resume=True)
    assert [line["step"] for line in read_metrics(again / "run")] == [0, 1], "nothing was cut"


def test_other_problems_under_the_same_name_are_refused(again):
    rows = gsm8k_rows(30)
    rows[29]["answer"] = "#### 7"
    write_jsonl(again / "mine.jsonl", rows)
    with pytest.raises(CheckpointError, match=r"^the problems are not what"):
        train(again, steps=2, resume=True)


def test_settings_of_memory_may_change_and_other_versions_are_said(again, capsys):
    text = (again / "run" / "versions.json").read_text()
    (again / "run" / "versions.json").write_text(json.dumps(json.loads(text) | {"torch": "1.0"}))
    train(again, "learner.max_tokens=64", "sampler.max_slots=2", steps=2, resume=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "learner.max_tokens is another now" in said and "sampler.max_slots is another now" in said
    assert "torch was 1.0 when the run began" in said
    assert [line["step"] for line in read_metrics(again / "run")] == [0, 1, 2]


def test_a_record_of_versions_that_is_gone_is_said_and_stops_nothing(again, capsys):
    (again / "run" / "versions.json").write_text("[")
    train(again, steps=2, resume=True)
    assert "versions.json cannot be read" in " ".join(capsys.readouterr().out.split())


def test_what_memory_advice_names_may_be_lowered_in_a_resumed_run():
    words = " ".join(ADVICE.values()).replace(",", " ").replace(";", " ").replace(")", " ").split()
    named = {w for w in words if w.startswith(("learner.", "sampler.", "guard.", "task."))}
    assert named == set(MEMORY)
