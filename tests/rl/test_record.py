"""What a run leaves behind survives kills, full disks and second runs."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import subprocess
import sys

import pytest
import torch

from onegrid.errors import CheckpointError, NonFiniteError
from onegrid.rl import checkpoint
from onegrid.rl.keep import Keeper
from onegrid.rl.record import Incident, Record, check_whole, free_run_folder, last_run_folder, read_metrics, versions
from onegrid.types import Group, Request, Rollout, Sampling
from tests.bytes import assert_same_bytes


def write_steps(record: Record, first: int, last: int) -> None:
    """Lines that depend on the step alone, as those of a deterministic run do."""
    for step in range(first, last + 1):
        record.metrics(step, {"train/loss": 1.0 / step, "rollout/tokens": step * 3, "eval/set": "heldout"})


def test_a_line_is_a_flat_sorted_object_with_exact_floats(tmp_path):
    record = Record(tmp_path)
    record.metrics(1, {"b": 0.1 + 0.2, "a": -0.0, "c": 5e-324})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"a": -0.0, "b": 0.30000000000000004, "c": 5e-324, "step": 1}\n'


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_an_error_and_never_written(tmp_path, bad):
    record = Record(tmp_path)
    with pytest.raises(NonFiniteError, match=r"step 3: mismatch/kl = "):
        record.metrics(3, {"mismatch/kl": bad, "train/loss": 1.0})
    assert read_metrics(tmp_path) == []


def test_a_folder_that_holds_a_run_is_refused_without_resume(tmp_path):
    write_steps(Record(tmp_path), 1, 2)
    with pytest.raises(CheckpointError, match="--resume"):
        Record(tmp_path)
    assert len(read_metrics(tmp_path)) == 2


@pytest.mark.parametrize("cut", range(7))
@pytest.mark.parametrize("torn", [b"", b'{"step": 7, "train/lo', b'{"step": 7}'])
def test_resume_cuts_back_to_the_checkpoint_and_ends_in_the_same_bytes(tmp_path, cut, torn):
    write_steps(Record(tmp_path / "whole"), 1, 9)
    write_steps(Record(tmp_path / "cut"), 1, 6)
    with open(tmp_path / "cut" / "metrics.jsonl", "ab") as file:
        file.write(torn)
    write_steps(Record(tmp_path / "cut", resume_step=cut), cut + 1, 9)
    whole, again = (tmp_path / name / "metrics.jsonl" for name in ("whole", "cut"))
    assert again.read_bytes() == whole.read_bytes()


def test_a_file_that_is_not_a_record_is_not_cut(tmp_path):
    Record(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("my notes\nmore\n")
    with pytest.raises(CheckpointError, match="line 1 is not a line of a run"):
        Record(tmp_path, resume_step=0)
    assert (tmp_path / "metrics.jsonl").read_text() == "my notes\nmore\n"


def test_a_folder_in_use_by_another_process_is_refused_and_free_again_after_a_kill(tmp_path):
    take = "import fcntl, os, sys; file = open(sys.argv[1], 'a+'); fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    hold = take + "; print(os.getpid(), file=file, flush=True); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"in use by another run \(process {other.pid}\)"):
            Record(tmp_path)
        other.kill()
    mine = Record(tmp_path)
    second = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert "BlockingIOError" in second.stderr and mine.folder == tmp_path


@pytest.mark.parametrize("write", ["text", "metrics", "incident", "rollouts"])
def test_a_disk_that_refuses_is_an_error_with_the_path(tmp_path, write, monkeypatch):
    record = Record(tmp_path)
    calls = {
        "text": lambda: record.text("plan.json", "{}" * 5000),
        "metrics": lambda: record.metrics(1, {"a": "b" * 9000}),
        "incident": lambda: record.incident(incident_of(found="b" * 9000)),
        "rollouts": lambda: record.rollouts(1, [], str),
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(CheckpointError, match=rf"cannot write {tmp_path}.*File too large"):
            calls[write]()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("line", [b"xx", b"[]", b"3", b'{"step": "a"}', b'{"step": null}', b"\xff"])
def test_a_line_that_is_none_of_a_run_is_named(tmp_path, line):
    Record(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        Record(tmp_path, resume_step=0)
        check_whole(tmp_path, 0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == line + b"\n"


def incident_of(**changes) -> Incident:
    fields = {"step": 4, "version": 3, "check": "digest", "condition": "C2", "tensors": ("a.weight",)}
    texts = {"expected": "1", "found": "2", "likely_cause": "a lost bucket", "action": "version 3 keeps serving"}
    return Incident(**(fields | texts | changes))


def test_an_incident_keeps_every_field(tmp_path):
    incident = incident_of()
    Record(tmp_path).incident(incident)
    assert json.loads((tmp_path / "incidents.jsonl").read_text()) == dataclasses.asdict(incident) | {
        "tensors": ["a.weight"]
    }


def test_rollouts_read_back_with_the_bits_of_their_log_probabilities(tmp_path):
    import pyarrow.parquet as pq

    logp_R = torch.tensor([-0.1, -1e-45, -20.5])
    request = Request(prompt_index=5, sample=1, prompt_tokens=(1, 2), seed=0, sampling=Sampling())
    rollout = Rollout(
        request=request,
        tokens_R=torch.tensor([7, 8, 2]),
        logp_R=logp_R,
        version_R=torch.tensor([3, 3, 3]),
        finish="stop",
        text="é7",
    )
    record = Record(tmp_path)
    record.rollouts(2, [Group(group_id=5, rollouts=(rollout,))], lambda tokens: " ".join(map(str, tokens)))
    (row,) = pq.read_table(tmp_path / "rollouts" / "step_000002.parquet").to_pylist()
    assert_same_bytes(torch.tensor(row.pop("logp"), dtype=torch.float32), logp_R)
    assert row == {
        "step": 2,
        "group": 5,
        "sample": 1,
        "prompt": "1 2",
        "response": "é7",
        "reward": None,
        "scored": False,
        "rewards": [],
        "data_source": None,
        "ground_truth": None,
        "extra_info": None,
        "tokens": [7, 8, 2],
        "version": [3, 3, 3],
        "finish": "stop",
        "seed": 0,
        "prompt_tokens": [1, 2],
        "learned": True,
        "kept": None,
        "routing": None,
        "routing_shape": None,
    }
    Record(tmp_path, resume_step=1)
    assert not list((tmp_path / "rollouts").iterdir())


def test_a_checkpoint_reads_back_with_its_bytes_and_dtypes(tmp_path):
    state = {
        "learner": {"master": torch.tensor([1.0, -0.0, float("nan")]), "codes": torch.arange(5, dtype=torch.uint8)},
        "step": 3,
        "constant_steps": 12,
        "names": ["a", "b"],
    }
    path = checkpoint.save(tmp_path, 3, state, keep=2)
    assert path == checkpoint.latest(tmp_path) and path.name == "global_step_3"
    loaded = checkpoint.load(path)
    assert_same_bytes(list(loaded.pop("learner").values()), list(state.pop("learner").values()))
    assert loaded == state


def test_the_last_k_checkpoints_stay(tmp_path):
    for step in (1, 2, 10, 9, 11):
        checkpoint.save(tmp_path, step, state_of(step), keep=3)
    assert checkpoint.steps(tmp_path) == [9, 10, 11]
    assert checkpoint.load(checkpoint.latest(tmp_path))["step"] == 11


def test_a_step_saved_twice_is_never_away_for_longer_than_a_rename_and_leftovers_of_kills_go(tmp_path):
    checkpoint.save(tmp_path, 2, state_of(2) | {"constant_steps": 1}, keep=2)
    (tmp_path / "checkpoints" / ".partial_7").mkdir()
    path = checkpoint.save(tmp_path, 2, state_of(2) | {"constant_steps": 5}, keep=2)
    assert checkpoint.load(path)["constant_steps"] == 5
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["global_step_2"]


def test_what_lies_among_checkpoints_and_is_none_is_left_alone_and_never_taken_for_one(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in ("global_step_007", "global_step_x", "global_step_\u0663", "other"):
        (folder / name).mkdir(parents=True)
    for name in ("global_step_99", "notes.txt"):
        (folder / name).touch()
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state_of(step), keep=1)
    assert checkpoint.latest(tmp_path) == folder / "global_step_2" and checkpoint.steps(tmp_path) == [2]
    assert {p.name for p in folder.iterdir()} >= {"global_step_007", "global_step_99", "other", "notes.txt"}
    (folder / "global_step_98").mkdir()  # of another run, so later that it would be the last
    checkpoint.save(tmp_path, 3, state_of(3), keep=1)
    assert checkpoint.steps(tmp_path) == [3, 98], "what was just written stays"
    (folder / "best").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot make .*best a link to global_step_3.*move what is there away"):
        checkpoint.save(tmp_path, 3, state_of(3), keep=1, best=3)
    assert not list(folder.glob(".partial*"))


def test_a_folder_with_checkpoints_of_another_run_is_refused(tmp_path):
    checkpoint.save(tmp_path, 98, state_of(98), keep=1)
    with pytest.raises(CheckpointError, match="holds checkpoints of another run"):
        Record(tmp_path)


def test_a_checkpoint_never_knows_more_than_the_lines_that_are_on_the_disk(tmp_path, monkeypatch):
    """After a power cut, that is; a kill alone cannot tell."""
    record, events = Record(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *given, **named: events.append("save") or save(*given, **named))
    record.metrics(1, {"a": 1.0})
    Keeper(record, checkpoint.CheckpointConfig(), done=None).save(1, state_of(1))
    lines = {(tmp_path / name).stat().st_ino for name in ("metrics.jsonl", "incidents.jsonl")}
    state = tmp_path / "checkpoints" / "global_step_1"
    assert set(events[: events.index("save")]) == lines
    assert {(state / "state.pt").stat().st_ino, state.stat().st_ino, state.parent.stat().st_ino} <= set(events)


def state_of(step: int) -> dict[str, object]:
    """The least that a checkpoint of a run holds."""
    return {"learner": {"master": torch.arange(2000.0)}, "step": step, "constant_steps": 0}


class FullDisk:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.file.close()

    def write(self, data) -> int:
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()


@pytest.mark.parametrize("room", [0, 100, 3000])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_so(tmp_path, monkeypatch, room):
    state = state_of(1)
    good = checkpoint.save(tmp_path, 1, state, keep=1)
    create = checkpoint._create
    monkeypatch.setattr(checkpoint, "_create", lambda path: FullDisk(create(path), room))
    with pytest.raises(CheckpointError, match=r"No space left on device.*the last good one is .*global_step_1"):
        checkpoint.save(tmp_path, 2, state, keep=1)
    assert checkpoint.latest(tmp_path) == good
    assert_same_bytes(checkpoint.load(good)["learner"]["master"], state["learner"]["master"])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]


@pytest.mark.parametrize("at", [0.02, 0.3, 0.5, 0.7])
def test_one_flipped_bit_in_a_checkpoint_is_an_error_that_names_the_earlier_one(tmp_path, at):
    checkpoint.save(tmp_path, 1, state_of(1), keep=2)
    path = checkpoint.save(tmp_path, 2, state_of(2), keep=2)
    data = bytearray((path / "state.pt").read_bytes())
    data[int(len(data) * at)] ^= 16
    (path / "state.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged.* goes on from global_step_1"):
        checkpoint.load(path)


@pytest.mark.parametrize("state", [[1], {}, {"learner": {}, "step": 1}])
def test_what_is_not_the_state_of_a_run_is_refused_before_anything_is_cut(tmp_path, state):
    path = checkpoint.save(tmp_path, 1, state_of(1), keep=1)
    torch.save(state, path / "state.pt")
    with pytest.raises(CheckpointError, match="not the state of a run: it lacks some of constant_steps, learner, step"):
        checkpoint.load(path)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, state_of(1), keep=1)
    with pytest.raises(CheckpointError, match=r"state\.pt is that of step 1; there is no other checkpoint here"):
        checkpoint.load(path.rename(path.with_name("global_step_9")))


def test_a_torn_checkpoint_is_an_error_with_its_name(tmp_path):
    path = checkpoint.save(tmp_path, 1, state_of(1), keep=1)
    whole = (path / "state.pt").read_bytes()
    (path / "state.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="global_step_1"):
        checkpoint.load(path)
    (path / "state.pt").unlink()
    with pytest.raises(CheckpointError, match="global_step_1"):
        checkpoint.load(path)


def test_run_folders_count_up(tmp_path):
    assert last_run_folder(tmp_path, "quick") is None
    for n in (1, 2):
        folder = free_run_folder(tmp_path, "quick")
        assert folder.name == f"quick-{n}"
        Record(folder)
    assert last_run_folder(tmp_path, "quick") == tmp_path / "quick-2"


def test_versions_say_what_the_bits_depend_on():
    assert {"onegrid", "torch", "cpu", "threads", "gpu"} <= versions().keys()
