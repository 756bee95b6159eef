"""Trackers get what the record has, each through its real library, and a resumed run goes on in the same place."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from onegrid.errors import ConfigError
from onegrid.rl.record import Record, read_metrics
from onegrid.tracker import trackers as trackers_file
from onegrid.tracker.config import MlflowConfig, TrackersConfig
from onegrid.tracker.trackers import Trackers, check_installed, read_state

ROOT = Path(__file__).parent.parent.parent
SETTINGS = {"seed": 3, "learner": {"lr": 1e-4, "name": "<b>"}}


def values(step: int) -> dict[str, float | bool | str]:
    """A line with the keys that are awkward somewhere: one that begins another, counts, text, truth."""
    third = step / 3
    return {
        "train/grad_norm": 1.0 + third,
        "train/grad_norm/layers.0": third,
        "mismatch/max_abs": 0.0,
        "rollout_corr/kl": -1e-9 * step,
        "guard/digest": 1,
        "text": "kept in the file",
        "truth": True,
    }


def numbers(step: int) -> dict[str, float]:
    """What a tracker is told of that line."""
    return {key: float(value) for key, value in values(step).items() if key not in ("text", "truth")}


def run_twice(folder: Path, config: TrackersConfig) -> None:
    """Steps 0 to 4, the last two lost by a kill after the checkpoint of step 2, and then up to 6."""
    for first, resume_step in ((0, None), (3, 2)):
        session(folder, config, first, resume_step)


def session(folder: Path, config: TrackersConfig, first: int, resume_step: int | None) -> None:
    """One process's part of that run."""
    record = Record(folder, resume_step=resume_step)
    with Trackers(config, folder, settings=SETTINGS, past=read_metrics(folder)) as trackers:
        record.listener = trackers.log
        for step in range(first, 5 if first == 0 else 7):
            record.metrics(step, values(step))
    del record  # lets go of the lock


def python(code: str, *arguments: object, **variables: str) -> str:
    """What a process of its own prints."""
    env = os.environ | variables | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def offline_records(data: bytes) -> Iterator[bytes]:
    """Messages of a .wandb file, which is a LevelDB log with a header of seven bytes: blocks of 32 KiB, and in them
    fragments of crc (4 bytes), length (2) and type (1 whole, 2 first, 3 middle, 4 last)."""
    at, message = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no fragment fits: the rest of the block is padding
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            return
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield message
            message = b""


EXPECTED = {key: [(step, numbers(step)[key]) for step in range(7)] for key in numbers(0)}


def test_tensorboard_has_every_step_once_in_double_precision(tmp_path):
    run_twice(tmp_path, TrackersConfig(use=("tensorboard",)))
    assert tensorboard_values(tmp_path) == EXPECTED


def tensorboard_values(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by key, from the event files of a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util import tensor_util
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    tags = set(events.Tags()["tensors"]) - {"config/text_summary"}
    return {
        tag: [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)] for tag in tags
    }


def test_wandb_has_every_step_once_offline_under_one_id(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.tracker.test_trackers import session\n"
        "from onegrid.tracker.config import TrackersConfig, WandbConfig\n"
        "config = TrackersConfig(use=('wandb',), wandb=WandbConfig(project='p', mode='offline'))\n"
        "session(Path(sys.argv[1]), config, int(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)\n"
    )
    # A process each, as a resume has: the library's service knows a run by its id, is told of its end without an
    # answer, and may take the next run of that id for the one that ends.
    python(code, tmp_path, 0)
    python(code, tmp_path, 3, 2)
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[tuple[int, float]]] = {}
    ids = set()
    for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        for data in offline_records(path.read_bytes()):
            message = wandb_internal_pb2.Record()
            message.ParseFromString(data)
            if message.HasField("run"):
                ids.add(message.run.run_id)
            if message.HasField("history"):
                items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in message.history.item}
                for key in items.keys() & EXPECTED.keys():
                    found.setdefault(key, []).append((items["step"], items[key]))
    assert found == EXPECTED
    assert ids == {read_state(tmp_path)["wandb"]["run"]}


def test_mlflow_has_every_step_once_in_one_run(tmp_path):
    uri = f"sqlite:///{tmp_path}/elsewhere.db"
    run_twice(tmp_path / "run", TrackersConfig(use=("mlflow",), mlflow=MlflowConfig(uri=uri)))
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("onegrid")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == read_state(tmp_path / "run")["mlflow"]["run"]
    assert run.info.status == "FINISHED"
    assert run.data.params["learner.lr"] == "0.0001"
    found = {k: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, k)] for k in run.data.metrics}
    assert found == EXPECTED


def test_trackio_has_every_step_once_in_one_run(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.tracker.test_trackers import run_twice\n"
        "from onegrid.tracker.config import TrackersConfig\n"
        "run_twice(Path(sys.argv[1]), TrackersConfig(use=('trackio',)))\n"
        "import json, trackio.sqlite_storage as s\n"
        "runs = s.SQLiteStorage.get_runs('onegrid')\n"
        "print(json.dumps([runs, s.SQLiteStorage.get_logs('onegrid', runs[0])]))"
    )
    printed = python(code, tmp_path / "run", TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    line = next(line for line in reversed(printed.splitlines()) if line.startswith("[["))
    runs, logs = json.loads(line)
    assert runs == [f"run-{read_state(tmp_path / 'run')['trackio']['run']}"]
    found = {key: [(log["step"], log[key]) for log in logs] for key in EXPECTED}
    assert found == EXPECTED


def test_a_library_that_is_not_here_ends_the_run_before_it_begins(monkeypatch):
    monkeypatch.setitem(trackers_file.LIBRARIES, "wandb", ("a_library_that_is_not_here",))
    with pytest.raises(ConfigError, match=r"pip install 'onegrid\[wandb\]'"):
        check_installed(TrackersConfig(use=("wandb",)))
    with pytest.raises(ConfigError, match="wandb_typo; the trackers are tensorboard"):
        TrackersConfig(use=("wandb_typo",))
    with pytest.raises(ConfigError, match="name each tracker once"):
        TrackersConfig(use=("wandb", "wandb"))


def test_a_library_that_refuses_to_open_ends_the_run_before_it_begins(tmp_path):
    config = TrackersConfig(use=("mlflow",), mlflow=MlflowConfig(uri="nonsense://x"))
    with pytest.raises(ConfigError, match="mlflow does not open"):
        Trackers(config, tmp_path, settings=SETTINGS)
    assert not (tmp_path / "trackers.json").exists()


def test_a_write_that_fails_is_reported_once_counted_and_stops_nothing(tmp_path, monkeypatch):
    said: list[str] = []
    record = Record(tmp_path)
    with Trackers(TrackersConfig(use=("tensorboard",)), tmp_path, settings=SETTINGS, say=said.append) as trackers:
        record.listener = trackers.log
        record.metrics(0, values(0))

        def full(*arguments, **options):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr("onegrid.tracker.tensorboard_run.TensorboardRun.log", full)
            record.metrics(1, values(1))
            record.metrics(2, values(2))
        record.metrics(3, values(3))
    assert len(said) == 1 and "tensorboard failed (OSError" in said[0] and "training goes on" in said[0]
    assert read_state(tmp_path)["tensorboard"] | {"run": ""} == {"run": "", "last_step": 3, "lost": 2}
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_state_that_cannot_be_read_is_an_error_only_for_a_run_with_trackers(tmp_path):
    (tmp_path / "trackers.json").write_text("{torn")
    with Trackers(TrackersConfig(), tmp_path, settings=SETTINGS):
        pass
    with pytest.raises(ConfigError, match="is not what a run wrote"):
        Trackers(TrackersConfig(use=("tensorboard",)), tmp_path, settings=SETTINGS)


def test_every_tracker_has_an_extra_of_its_name():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, libraries in trackers_file.LIBRARIES.items():
        assert len(extras[name]) == len(libraries)


def test_a_run_reports_what_its_record_says_and_goes_on_after_a_resume(tmp_path):
    from onegrid.cli.train import run
    from tests.rl.tiny import write_tiny_run

    config, folder = write_tiny_run(tmp_path), tmp_path / "run"
    run(config, [], run_dir=folder, num_steps=1, resume=False, dry_run=False)
    run(config, ['trackers.use=["tensorboard"]'], run_dir=folder, num_steps=2, resume=True, dry_run=False)
    found, lines = tensorboard_values(folder), read_metrics(folder)
    for key in ("mismatch/max_abs", "rollout_corr/kl", "rollout/raw_reward"):
        assert found[key] == [(line["step"], line[key]) for line in lines if key in line], key
    assert found["eval/held_out/accuracy"][0][0] == 0, "a tracker that comes later hears what it has missed"
