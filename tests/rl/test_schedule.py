"""One step off policy, and half runs: the same proofs, the same bytes."""

from __future__ import annotations

from functools import partial

import pyarrow.parquet as pq
import pytest

from onegrid.cli.train import run
from onegrid.errors import CheckpointError, ConfigError, SyncError
from onegrid.rl import checkpoint, loop
from onegrid.rl.record import read_metrics
from tests.rl.test_loop import Killed, killed_at, rollouts
from tests.rl.tiny import lines_without_clocks, write_tiny_run

OFF = "loop.off_policy_steps=1"


def train(path, run_dir, *overrides, resume=False, steps=None):
    """`onegrid train` as a function."""
    run(path, overrides, run_dir=run_dir, num_steps=steps, resume=resume, dry_run=False)


@pytest.fixture(scope="module")
def off(tmp_path_factory):
    """(configuration, run directory) of four steps, each but the first with a batch of the version before."""
    folder = tmp_path_factory.mktemp("off")
    path = write_tiny_run(folder)
    train(path, folder / "run", OFF, steps=4)
    return path, folder / "run"


def learned(run_dir):
    """What the lines say of learning, without what only a sampler in the run can add."""
    drop = ("eval/", "sync/", "perf/", "guard/")
    return [{k: v for k, v in line.items() if not k.startswith(drop)} for line in read_metrics(run_dir)]


def test_a_batch_of_the_version_before_is_proved_at_that_version(off):
    steps = read_metrics(off[1])[1:]
    assert [line["train/versions_behind"] for line in steps] == [0, 1, 1, 1]
    for line in steps:
        assert line["mismatch/max_abs"] == 0.0 and line["mismatch/share_equal"] == 1.0
        assert line["guard/sentinel"] == line["guard/freshness"] == 1
    assert steps[0]["train/off_policy_kl"] == 0.0
    moved = [line for line in steps if line["train/off_policy_kl"] != 0.0]
    assert moved and all(line["train/off_policy_ess"] < 1.0 for line in moved)
    versions = [{v for row in rows for v in row["version"]} for rows in rollouts(off[1]).values()]
    assert versions == [{0}, {0}, {1}, {2}]


@pytest.mark.parametrize("cut", [0, 1, 3, 4])
def test_case_P1_the_batch_that_is_ahead_survives_a_kill(off, tmp_path, monkeypatch, cut):
    path, run_dir = off
    killed_at(monkeypatch, cut)
    with pytest.raises(Killed):
        train(path, tmp_path, OFF, steps=4)
    monkeypatch.undo()
    train(path, tmp_path, OFF, steps=4, resume=True)
    assert lines_without_clocks(tmp_path) == lines_without_clocks(run_dir)
    assert rollouts(tmp_path) == rollouts(run_dir)


def test_drawing_in_turns_gives_the_bytes_of_drawing_beside(off, tmp_path, monkeypatch):
    path, run_dir = off
    monkeypatch.setattr(loop, "schedule_of", lambda *a, **named: loop_schedule(*a, **(named | {"overlap": False})))
    train(path, tmp_path, OFF, steps=4)
    assert lines_without_clocks(tmp_path) == lines_without_clocks(run_dir)


loop_schedule = loop.schedule_of


def test_a_lost_bit_is_seen_before_the_batch_that_it_made_is_learned(tmp_path, monkeypatch):
    path = write_tiny_run(tmp_path)
    synced = loop.guard_sync

    def sync_and_corrupt(learner, sampler, guard):
        report = synced(learner, sampler, guard)
        if learner.version == 1:
            key = next(k for k in sampler.weights.operands if k.endswith("q_proj.weight"))
            sampler.weights.operands[key].values[0, 0] *= 1.5
        return report

    monkeypatch.setattr(loop, "guard_sync", sync_and_corrupt)
    with pytest.raises(SyncError, match="the same bits on both sides, as the plan promises"):
        train(path, tmp_path / "run", OFF, steps=4)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1]


def test_a_batch_that_was_ahead_and_is_damaged_is_an_error(off, tmp_path):
    import shutil

    path, run_dir = off
    shutil.copytree(run_dir, tmp_path / "run")
    for step in checkpoint.steps(tmp_path / "run")[2:]:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"global_step_{step}")
    state = checkpoint.load(checkpoint.latest(tmp_path / "run"))
    assert state["ahead"]["step"] == 3
    for ahead in ({"step": 3}, state["ahead"] | {"rollouts": state["ahead"]["rollouts"][:-70]}, [1]):
        checkpoint.save(tmp_path / "run", 2, state | {"ahead": ahead}, keep=9)
        with pytest.raises(CheckpointError, match=r"ahead|does not hold the state"):
            train(path, tmp_path / "run", OFF, steps=4, resume=True)


@pytest.mark.parametrize("overrides", [(), (OFF,), ("dynamic.max_rounds=2", "sampling.top_k=5")])
def test_rollouts_that_a_run_has_kept_train_to_the_same_bytes(tmp_path, overrides):
    path = write_tiny_run(tmp_path)
    train(path, tmp_path / "run", *overrides)
    train(path, tmp_path / "replay", *overrides, f"debug.train_only={tmp_path / 'run'}")
    assert learned(tmp_path / "replay") == learned(tmp_path / "run")
    assert rollouts(tmp_path / "replay") == rollouts(tmp_path / "run")
    whole = read_metrics(tmp_path / "replay")
    assert not any(key.startswith(("eval/", "sync/")) for line in whole for key in line)
    assert all(line["guard/sentinel"] == line["guard/freshness"] == 1 for line in whole[1:])


def test_rollouts_of_an_earlier_version_train_to_the_same_bytes(off, tmp_path):
    """Files that do not say what rewards were given."""
    path, run_dir = off
    (tmp_path / "old").mkdir()
    for file in (run_dir / "rollouts").iterdir():
        table = pq.read_table(file).drop_columns(["rewards", "data_source", "ground_truth", "extra_info"])
        pq.write_table(table, tmp_path / "old" / file.name)
    train(path, tmp_path / "replay", OFF, f"debug.train_only={tmp_path / 'old'}", steps=4)
    assert learned(tmp_path / "replay") == learned(run_dir)


def test_rollouts_only_are_of_the_start_and_can_be_trained_on(tmp_path, monkeypatch):
    path = write_tiny_run(tmp_path)
    train(path, tmp_path / "only", "debug.rollouts_only=true")
    assert [line["step"] for line in read_metrics(tmp_path / "only")] == [0, 1, 2, 3]
    assert not checkpoint.steps(tmp_path / "only")
    assert {v for rows in rollouts(tmp_path / "only").values() for row in rows for v in row["version"]} == {0}
    with pytest.raises(ConfigError, match="rollouts only leave none"):
        train(path, tmp_path / "only", "debug.rollouts_only=true", resume=True)
    killed_at(monkeypatch, 2)
    replay = f"debug.train_only={tmp_path / 'only'}"
    with pytest.raises(Killed):
        train(path, tmp_path / "train", replay)
    monkeypatch.undo()
    train(path, tmp_path / "train", replay, resume=True)
    first, *later = read_metrics(tmp_path / "train")[1:]
    assert first["mismatch/max_abs"] == 0.0
    assert [line["train/versions_behind"] for line in later] == [1, 2]
    assert not any("mismatch/max_abs" in line for line in later), "nothing is claimed across versions"


def test_rollouts_that_are_not_there_or_of_another_kind_are_refused_by_name(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write_tiny_run(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no rollouts/step_N\.parquet"):
        train(path, tmp_path / "run", "debug.train_only=model")
    with pytest.raises(ConfigError, match="exclude each other"):
        train(path, tmp_path / "run", "debug.train_only=model", "debug.rollouts_only=true")
    (tmp_path / "kept").mkdir()
    replay = partial(train, path, tmp_path / "run", "debug.train_only=kept")
    pq.write_table(pa.table({"tokens": [[1]]}), tmp_path / "kept" / "step_000001.parquet")
    with pytest.raises(CheckpointError, match=r"step_000001\.parquet lacks the columns finish, group"):
        replay()
    (tmp_path / "kept" / "step_000001.parquet").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"cannot read the rollouts of step 1 from .*record\.rollouts_every"):
        replay(resume=True)


@pytest.mark.parametrize("strange", [18, -1])
def test_rollouts_of_a_model_with_other_ids_are_refused_before_a_product_reads_them(off, tmp_path, strange):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, run_dir = off
    kept = tmp_path / "step_000001.parquet"
    table = pq.read_table(run_dir / "rollouts" / kept.name)
    place = table.column_names.index("tokens")
    tokens = [[strange, *row[1:]] for row in table["tokens"].to_pylist()]
    pq.write_table(table.set_column(place, "tokens", pa.array(tokens, pa.list_(pa.int32()))), kept)
    with pytest.raises(CheckpointError, match=rf"has token {strange}, but the ids of this model are 0 \.\. 17"):
        train(path, tmp_path / "run", f"debug.train_only={tmp_path}")


def test_kl_can_be_paid_in_the_reward(tmp_path):
    path = write_tiny_run(tmp_path)
    train(path, tmp_path / "run", "loop.kl_in_reward=0.5", "recipe.preset=bf16", steps=2)
    first, second = read_metrics(tmp_path / "run")[1:]
    assert first["rollout/reward_with_kl"] == first["rollout/raw_reward"], "the start is its own reference"
    assert second["rollout/reward_with_kl"] != second["rollout/raw_reward"]
    with pytest.raises(ConfigError, match="reference_every must be 1"):
        train(path, tmp_path / "other", "loop.kl_in_reward=0.5", "loop.reference_every=2")


def test_sampled_answers_and_capped_weights_are_measured_where_asked_for(tmp_path):
    path = write_tiny_run(tmp_path)
    train(path, tmp_path / "run", "eval.samples=4", "eval.every=1", "correction.mode=token_truncate", OFF, steps=2)
    for line in read_metrics(tmp_path / "run"):
        for k in (1, 4):
            low, share, high = (line[f"eval/held_out/pass_at_{k}{end}"] for end in ("_low", "", "_high"))
            assert 0 <= low <= share <= high <= 1
        assert line["eval/held_out/sampled_low"] <= line["eval/held_out/sampled"]
    assert 0 <= line["train/correction_capped_share"] <= 1
    with pytest.raises(ConfigError, match=r"ks \[8\] of pass@k must lie in 1 .. samples, which is 4"):
        train(path, tmp_path / "other", "eval.samples=4", "eval.ks=[8]")
