"""A whole run on a tiny model: exact, recorded, and the same after any kill."""

from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest

from onegrid.cli.train import run, summary
from onegrid.config import load_config
from onegrid.errors import CheckpointError, ConfigError, SyncError, TaskError
from onegrid.guard.config import CHECKS
from onegrid.guard.watch import Watch
from onegrid.learner.learner import Learner
from onegrid.rl import checkpoint, loop
from onegrid.rl.characters import CharacterTokenizer
from onegrid.rl.record import read_metrics
from onegrid.sampler.engine import Engine
from tests.rl.tiny import lines_without_clocks, write_tiny_run


class Killed(BaseException):
    """Stands for a kill: nothing in the run may catch it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(configuration, run directory) of an uninterrupted run of three steps."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_tiny_run(folder)
    train(path, folder / "run")
    return path, folder / "run"


def train(path, run_dir, *overrides, resume=False, steps=None):
    """`onegrid train` as a function."""
    run(path, overrides, run_dir=run_dir, num_steps=steps, resume=resume, dry_run=False)


def test_every_step_is_exact_and_proved(whole):
    steps = read_metrics(whole[1])[1:]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["mismatch/max_abs"] == 0.0 and line["mismatch/share_equal"] == 1.0
        assert {line[f"guard/{check}"] for check in (*CHECKS, "transaction")} == {1}
    assert any(line["sync/codes_changed_share"] > 0 for line in steps)
    assert (whole[1] / "incidents.jsonl").read_text() == ""


def test_a_run_directory_holds_what_it_takes_to_repeat_the_run(whole, tmp_path):
    run_dir = whole[1]
    assert {"config.toml", "plan.json", "versions.json", "metrics.jsonl"} <= {p.name for p in run_dir.iterdir()}
    assert checkpoint.steps(run_dir) == [1, 2, 3]
    assert len(list((run_dir / "rollouts").iterdir())) == 3
    assert load_config(run_dir / "config.toml").seed == 3
    train(run_dir / "config.toml", tmp_path / "again")
    assert lines_without_clocks(tmp_path / "again") == lines_without_clocks(run_dir)


@pytest.mark.parametrize("cut", range(4))
def test_case_P1_a_run_resumed_at_any_step_ends_in_the_bytes_of_an_uninterrupted_one(whole, tmp_path, monkeypatch, cut):
    path, run_dir = whole
    killed_at(monkeypatch, cut)
    with pytest.raises(Killed):
        train(path, tmp_path)
    monkeypatch.undo()
    train(path, tmp_path, resume=True)
    assert lines_without_clocks(tmp_path) == lines_without_clocks(run_dir)
    assert rollouts(tmp_path) == rollouts(run_dir)


def test_case_P1_a_run_resumed_twice_is_still_the_same(whole, tmp_path, monkeypatch):
    path, run_dir = whole
    for cut, resume in ((1, False), (2, True)):
        killed_at(monkeypatch, cut)
        with pytest.raises(Killed):
            train(path, tmp_path, resume=resume)
        monkeypatch.undo()
    train(path, tmp_path, resume=True)
    assert lines_without_clocks(tmp_path) == lines_without_clocks(run_dir)


def test_case_P1_a_record_with_fewer_steps_than_planned_is_an_error(whole, tmp_path):
    path, run_dir = whole
    shutil.copytree(run_dir, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(CheckpointError, match="3 lines for 3 steps and the start"):
        train(path, tmp_path / "run", resume=True)


def test_a_resume_with_fewer_steps_than_done_says_so(whole, tmp_path):
    path, run_dir = whole
    with pytest.raises(ConfigError, match=r"num_steps is 2, but .* has done 3 steps already"):
        train(path, run_dir, resume=True, steps=2)
    assert len(read_metrics(run_dir)) == 4


def test_a_resume_without_the_configuration_that_began_it_is_refused(whole, tmp_path):
    path, run_dir = whole
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run" / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.toml"):
        train(path, tmp_path / "run", resume=True)


def test_a_longer_run_goes_on_from_a_finished_one(whole, tmp_path):
    path, run_dir = whole
    shutil.copytree(run_dir, tmp_path / "run")
    train(path, tmp_path / "run", resume=True, steps=4)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]
    assert lines_without_clocks(tmp_path / "run")[:4] == lines_without_clocks(run_dir)


def test_a_resume_with_another_configuration_is_refused_by_name(whole, tmp_path):
    path, run_dir = whole
    with pytest.raises(CheckpointError, match=r"learner\.lr"):
        train(path, run_dir, "learner.lr=0.5", resume=True)


def test_case_M12_a_run_learns_the_ids_it_sampled_whatever_their_text_would_be_encoded_to(tmp_path, monkeypatch):
    path, sampled, learned = write_tiny_run(tmp_path), [], []
    generate, update = Engine.generate, Learner.forward_backward

    def generated(engine, requests, *rest):
        found = generate(engine, requests, *rest)
        sampled.extend(found)
        return found

    def updated(learner, batch, **given):
        learned.extend(batch.sequences)
        return update(learner, batch, **given)

    monkeypatch.setattr(CharacterTokenizer, "decode", lambda self, ids: "1")  # so that no text leads back to its ids
    monkeypatch.setattr(Engine, "generate", generated)
    monkeypatch.setattr(Learner, "forward_backward", updated)
    train(path, tmp_path / "run", "eval.num_problems=0", steps=1)
    assert len(learned) == len(sampled) == 16 and len({len(r.tokens_R) for r in sampled}) > 1
    for sequence, rollout in zip(learned, sampled, strict=True):
        ids = [*rollout.request.prompt_tokens, *rollout.tokens_R.tolist()]
        assert sequence.tokens_T.tolist() == ids and sequence.sampler_logp_R is rollout.logp_R
    kept = pq.read_table(tmp_path / "run" / "rollouts" / "step_000001.parquet")
    assert kept["tokens"].to_pylist() == [rollout.tokens_R.tolist() for rollout in sampled]


def test_a_lost_bit_stops_the_run_before_the_update_and_leaves_an_incident(tmp_path, monkeypatch):
    path = write_tiny_run(tmp_path)
    synced = loop.guard_sync

    def sync_and_corrupt(learner, sampler, guard):
        report = synced(learner, sampler, guard)
        key = next(k for k in sampler.weights.operands if k.endswith("q_proj.weight"))
        sampler.weights.operands[key].values[0, 0] *= 1.5
        return report

    monkeypatch.setattr(loop, "guard_sync", sync_and_corrupt)
    with pytest.raises(SyncError, match="the same bits on both sides, as the plan promises"):
        train(path, tmp_path / "run")
    (incident,) = [json.loads(line) for line in (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()]
    assert (incident["check"], incident["step"], incident["version"]) == ("sentinel", 1, 0)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0]


def test_an_update_that_is_lost_while_it_reports_success_stops_the_run(tmp_path, monkeypatch):
    path = write_tiny_run(tmp_path)
    synced, reports = loop.guard_sync, []

    def sync_once(learner, sampler, guard):
        reports.append(reports[0] if reports else synced(learner, sampler, guard))
        return reports[0]

    monkeypatch.setattr(loop, "guard_sync", sync_once)
    with pytest.raises(SyncError, match=r"the learner has version 1, but tokens came from \[0\]") as caught:
        train(path, tmp_path / "run")
    assert caught.value.condition == "C7"
    incident, *_ = [json.loads(line) for line in (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()]
    assert (incident["check"], incident["condition"], incident["step"]) == ("freshness", "C7", 2)


@pytest.mark.parametrize(
    ("limit", "told"), [("guard.entropy_high=0.01", "train/entropy"), ("guard.entropy_low=0.999", "train/entropy")]
)
def test_a_policy_outside_of_the_limits_is_stopped_before_its_update(tmp_path, limit, told):
    path = write_tiny_run(tmp_path)
    with pytest.raises(SyncError, match=told) as caught:
        train(path, tmp_path / "run", limit)
    assert caught.value.condition == "C6"
    (incident,) = [json.loads(line) for line in (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()]
    assert (incident["check"], incident["step"], incident["version"]) == ("sentinel", 1, 0)
    assert "limits of the configuration" in incident["expected"]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0]
    train(path, tmp_path / "unwatched", limit, 'guard.off=["sentinel"]')


def test_an_interrupted_run_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    path = write_tiny_run(tmp_path)

    def interrupted(self, at, values):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Record, "metrics", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(path, tmp_path / "run")
    assert f"--resume --run-dir {tmp_path / 'run'}" in capsys.readouterr().out.replace("\n", " ")


def test_rewards_that_never_differ_end_the_run_with_a_message(tmp_path):
    path = write_tiny_run(tmp_path)
    with pytest.raises(TaskError, match=r"for 2 steps no group had rewards that differ"):
        train(path, tmp_path / "run", "task.digits=3", "loop.max_constant_steps=2")


def test_case_P1_steps_without_a_difference_and_charts_go_on_counting_after_a_kill(tmp_path, monkeypatch):
    path, charts = write_tiny_run(tmp_path), []
    never = ("task.digits=3", "loop.max_constant_steps=3")
    killed_at(monkeypatch, 3)
    with pytest.raises(Killed):
        train(path, tmp_path / "run", *never, steps=9)
    monkeypatch.undo()
    monkeypatch.setattr(Watch, "load_state", lambda self, state: charts.append(state))
    with pytest.raises(TaskError, match="for 3 steps no group"):
        train(path, tmp_path / "run", *never, resume=True, steps=9)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2, 3]
    last = checkpoint.load(tmp_path / "run" / "checkpoints" / "global_step_2")
    assert charts == [last["charts"]] and last["constant_steps"] == 2


def test_the_table_at_the_end_says_what_the_record_says(whole):
    from rich.console import Console

    console = Console(width=100, record=True)
    console.print(summary(whole[1]))
    text = console.export_text()
    for expected in ("held-out accuracy before", "0 nats", "27 passed, 0 failed", str(whole[1])[:20]):
        assert expected in text


def killed_at(monkeypatch, step: int) -> None:
    """The process dies while it writes the line of a step (0: the evaluation before the first)."""
    write = loop.Record.metrics

    def metrics(self, at, values):
        if at == step:
            raise Killed
        write(self, at, values)

    monkeypatch.setattr(loop.Record, "metrics", metrics)


def rollouts(run_dir) -> dict[str, object]:
    """All rollouts, by file."""
    import pyarrow.parquet as pq

    return {p.name: pq.read_table(p).to_pylist() for p in sorted((run_dir / "rollouts").iterdir())}
