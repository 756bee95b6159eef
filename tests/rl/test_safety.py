"""A run that is stopped, runs out of memory, or finds nothing to go on from says so and leaves what it can."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

import pytest
import torch

from onegrid.cli.train import run
from onegrid.config import load_config
from onegrid.errors import CheckpointError, ConfigError, OutOfMemoryError, StoppedError
from onegrid.rl import checkpoint, loop
from onegrid.rl.checkpoint import state_folder
from onegrid.rl.keep import Keeper
from onegrid.rl.out_of_memory import is_out_of_memory
from onegrid.rl.record import Record
from onegrid.study.parts import build, design
from tests.bytes import assert_same_bytes
from tests.rl.tiny import lines_without_clocks, write_tiny_run


def train(path, run_dir, *overrides, resume=False, steps=None):
    """`onegrid train` as a function."""
    run(path, overrides, run_dir=run_dir, num_steps=steps, resume=resume, dry_run=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(configuration, run directory) of an uninterrupted run of three steps."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_tiny_run(folder)
    train(path, folder / "run")
    return path, folder / "run"


def at_step(monkeypatch, step, act):
    """Something happens while the line of a step is written."""
    write = loop.Record.metrics

    def metrics(self, at, values):
        if at == step:
            act()
        write(self, at, values)

    monkeypatch.setattr(loop.Record, "metrics", metrics)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 0), (signal.SIGINT, 2)])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(whole, tmp_path, monkeypatch, number, step):
    path, run_dir = whole
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    at_step(monkeypatch, step, lambda: signal.raise_signal(number))
    with pytest.raises(StoppedError, match=f"{number.name}: the checkpoint of step {step} is written"):
        train(path, tmp_path, "checkpoint.every=0")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert checkpoint.steps(tmp_path) == [step]
    monkeypatch.undo()
    train(path, tmp_path, "checkpoint.every=0", resume=True)
    assert lines_without_clocks(tmp_path) == lines_without_clocks(run_dir)


def test_a_second_signal_insists(whole, tmp_path, monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    at_step(monkeypatch, 1, twice)
    with pytest.raises(KeyboardInterrupt):
        train(whole[0], tmp_path)


def test_a_signal_in_the_last_step_lets_the_run_end(whole, tmp_path, monkeypatch):
    at_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM))
    train(whole[0], tmp_path)
    assert lines_without_clocks(tmp_path) == lines_without_clocks(whole[1])


def test_the_exit_code_of_a_run_that_was_stopped_is_75(whole, tmp_path, monkeypatch, capsys):
    from onegrid import cli

    at_step(monkeypatch, 1, lambda: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(sys, "argv", ["onegrid", "train", str(whole[0]), "--run-dir", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 75
    assert capsys.readouterr().err == "onegrid: stopped by SIGTERM: the checkpoint of step 1 is written\n"
    assert checkpoint.steps(tmp_path / "run") == [1]


def allocate_more_than_there_is():
    """What torch says where no memory is left, really."""
    torch.empty(1 << 50, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("place", "stage", "advice"),
    [
        ("onegrid.sampler.engine.Engine.generate", "eval", "sampler.max_slots"),
        ("onegrid.learner.learner.Learner.forward_backward", "update", "learner.max_tokens"),
        ("onegrid.rl.loop.guard_sync", "sync", "guard.bucket_bytes"),
    ],
)
def test_memory_that_runs_out_names_the_stage_and_the_settings(tmp_path, monkeypatch, place, stage, advice):
    path = write_tiny_run(tmp_path)
    monkeypatch.setattr(place, lambda *a, **named: allocate_more_than_there_is())
    with pytest.raises(OutOfMemoryError, match=rf"stage '{stage}' \(RuntimeError: .*{1 << 50} bytes.*{advice}"):
        train(path, tmp_path / "run")
    (incident,) = [json.loads(line) for line in (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()]
    assert incident["check"] == "memory" and advice in incident["action"]


def test_memory_that_runs_out_before_the_run_names_settings_too(tmp_path, monkeypatch):
    path = write_tiny_run(tmp_path)
    monkeypatch.setattr("onegrid.cli.train.build", lambda plan: allocate_more_than_there_is())
    with pytest.raises(OutOfMemoryError, match=r"sampler\.max_slots"):
        train(path, tmp_path / "run")


def test_an_error_of_another_kind_is_not_about_memory():
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), OSError(12, "Cannot allocate memory")):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shapes do not fit"), ValueError("out of memory"), OSError(28, "No space left")):
        assert not is_out_of_memory(error)


def test_a_resume_without_a_checkpoint_says_that_it_begins_anew(whole, tmp_path, monkeypatch, capsys):
    path, run_dir = whole
    train(path, tmp_path / "new", resume=True, steps=1)
    assert "has no checkpoint, so the run begins anew" in shown(capsys)
    at_step(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGTERM) or (_ for _ in ()).throw(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        train(path, tmp_path / "run", "checkpoint.every=0")
    monkeypatch.undo()
    capsys.readouterr()
    train(path, tmp_path / "run", "checkpoint.every=0", resume=True)
    assert "begins anew, and the 2 lines of metrics that were there are dropped" in shown(capsys)
    assert lines_without_clocks(tmp_path / "run") == lines_without_clocks(run_dir)


def shown(capsys):
    return " ".join(capsys.readouterr().out.split())


KEY = "eval/held_out/accuracy"


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 1)])
def test_the_best_checkpoint_stays_and_the_first_of_equal_ones(tmp_path, mode, best):
    values = [9.0, 1.0, 3.0, 3.0, 1.0, 2.0]  # the start does not count
    config = checkpoint.CheckpointConfig(every=2, keep=1, best_metric=KEY, best_mode=mode)

    def go_on(keeper, record, steps):
        for step in steps:
            record.metrics(step, {KEY: values[step]})
            if keeper.due(step, {KEY: values[step]}, last=step == 5):
                keeper.save(step, {"step": step, "constant_steps": 0, "learner": {}})

    record = Record(tmp_path)
    record.metrics(0, {KEY: values[0]})
    go_on(Keeper(record, config, done=None), record, range(1, 4))
    assert checkpoint.steps(tmp_path) == sorted({best, 2})
    (tmp_path / "checkpoints" / "best").unlink()  # as if killed before it was made
    del record
    record = Record(tmp_path, resume_step=2)
    go_on(Keeper(record, config, done=2), record, range(3, 6))
    assert checkpoint.steps(tmp_path) == [best, 5]
    assert os.readlink(tmp_path / "checkpoints" / "best") == f"global_step_{best}"
    assert checkpoint.load(tmp_path / "checkpoints" / "best")["step"] == best


def test_a_run_keeps_its_best(whole, tmp_path):
    settings = ("eval.every=1", "checkpoint.keep=1", f"checkpoint.best_metric={KEY}")
    train(whole[0], tmp_path, *settings, steps=2)
    assert state_folder(tmp_path / "checkpoints" / "best") is not None
    assert checkpoint.steps(tmp_path)[0] == int(os.readlink(tmp_path / "checkpoints" / "best").rpartition("_")[2])


def test_a_best_that_no_evaluation_gives_is_refused_at_the_start(whole, tmp_path):
    with pytest.raises(ConfigError, match=r"eval/held_out/acuracy.* gives eval/held_out/accuracy"):
        train(whole[0], tmp_path, "checkpoint.best_metric=eval/held_out/acuracy")
    with pytest.raises(ConfigError, match="must be one of eval/"):
        train(whole[0], tmp_path / "other", "checkpoint.best_metric=train/loss")


def broken_states(state):
    """States of valid sums and wrong contents, by what is wrong."""
    learner = state["learner"]
    masters = learner["masters"]
    key = next(iter(masters))
    yield "no masters", {**learner, "masters": [1, 2]}
    yield "text for a master", {**learner, "masters": {**masters, key: "x"}}
    yield "another shape", {**learner, "masters": {**masters, key: masters[key][:1]}}
    yield "no optimizer", {**learner, "optimizer": None}
    yield "an empty optimizer", {**learner, "optimizer": {}}
    yield "groups of another model", {**learner, "optimizer": {**learner["optimizer"], "param_groups": []}}
    yield "a version that is text", {**learner, "version": "three"}
    yield "no plan", {**learner, "plan_digest": None}
    yield "nothing", {}


def test_a_state_of_valid_sums_and_wrong_contents_is_a_checkpoint_error(whole, tmp_path):
    path, run_dir = whole
    shutil.copytree(run_dir, tmp_path / "run")
    for step in (1, 2):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"global_step_{step}")
    state = checkpoint.load(checkpoint.latest(run_dir))
    for what, learner in broken_states(state):
        checkpoint.save(tmp_path / "run", 3, state | {"learner": learner}, keep=1)
        with pytest.raises(CheckpointError):
            train(path, tmp_path / "run", resume=True)
            pytest.fail(what)
    for change in ({"step": "3"}, {"constant_steps": None}, {"learner": 1}, {"bf16": 7}, {"step": -1}):
        checkpoint.save(tmp_path / "run", 3, state | change, keep=1)
        with pytest.raises(CheckpointError):
            train(path, tmp_path / "run", resume=True)
            pytest.fail(str(change))


def test_case_P4_an_optimizer_keeps_dtypes_and_bytes_and_the_last_step_is_always_saved(whole, tmp_path, monkeypatch):
    path, run_dir = whole
    before = checkpoint.load(checkpoint.latest(run_dir))["learner"]
    learner = build(design(load_config(run_dir / "config.toml"), tmp_path)).learner
    learner.load_state_dict(before)
    checkpoint.save(tmp_path, 3, {"learner": learner.state_dict(), "step": 3, "constant_steps": 0}, keep=1)
    after = checkpoint.load(checkpoint.latest(tmp_path))["learner"]

    assert len(before["optimizer"]["state"]) == len(before["masters"])
    for i, moment in before["optimizer"]["state"].items():
        for name, value in moment.items():
            assert value.dtype == after["optimizer"]["state"][i][name].dtype == torch.float32
            assert_same_bytes(after["optimizer"]["state"][i][name], value)
    assert before["optimizer"]["param_groups"] == after["optimizer"]["param_groups"]
    train(path, tmp_path / "run", "checkpoint.every=0", steps=1)
    assert checkpoint.steps(tmp_path / "run") == [1]

    def full(place):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_create", full)
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left on device; the last good .*global_step_1"):
        train(path, tmp_path / "run", "checkpoint.every=0", steps=2, resume=True)


def test_a_checkpoint_can_be_exported_while_its_run_goes_on(whole, tmp_path, monkeypatch):
    from onegrid.cli.export import run as export

    target = tmp_path / "exported"
    at_step(monkeypatch, 3, lambda: export(tmp_path / "run", target, adapter=False))
    train(whole[0], tmp_path / "run")
    assert (target / "model.safetensors").exists() and (target / "characters.json").exists()
    assert lines_without_clocks(tmp_path / "run") == lines_without_clocks(whole[1])
