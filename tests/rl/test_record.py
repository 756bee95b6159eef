"""What a run leaves behind survives kills, full disks and second runs."""

from __future__ import annotations

import errno
import json

import pytest
import torch

from onegrid.errors import CheckpointError, NonFiniteError
from onegrid.rl import checkpoint
from onegrid.rl.record import Incident, Record, free_run_folder, last_run_folder, read_metrics, versions
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


def test_an_incident_keeps_every_field(tmp_path):
    fields = {"step": 4, "version": 3, "check": "digest", "condition": "C2", "tensors": ("a.weight",)}
    texts = {"expected": "1", "found": "2", "likely_cause": "a lost bucket", "action": "version 3 keeps serving"}
    Record(tmp_path).incident(Incident(**fields, **texts))
    assert json.loads((tmp_path / "incidents.jsonl").read_text()) == fields | texts | {"tensors": ["a.weight"]}


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
        "tokens": [7, 8, 2],
        "version": [3, 3, 3],
        "finish": "stop",
    }
    Record(tmp_path, resume_step=1)
    assert not list((tmp_path / "rollouts").iterdir())


def test_a_checkpoint_reads_back_with_its_bytes_and_dtypes(tmp_path):
    state = {
        "learner": {"master": torch.tensor([1.0, -0.0, float("nan")]), "codes": torch.arange(5, dtype=torch.uint8)},
        "next": 12,
        "names": ["a", "b"],
    }
    path = checkpoint.save(tmp_path, 3, state, keep=2)
    assert path == checkpoint.latest(tmp_path) and path.name == "global_step_3"
    loaded = checkpoint.load(path)
    assert_same_bytes(list(loaded.pop("learner").values()), list(state.pop("learner").values()))
    assert loaded == state


def test_the_last_k_checkpoints_stay(tmp_path):
    for step in (1, 2, 10, 9, 11):
        checkpoint.save(tmp_path, step, {"step": step}, keep=3)
    assert checkpoint.steps(tmp_path) == [9, 10, 11]
    assert checkpoint.load(checkpoint.latest(tmp_path))["step"] == 11


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
    state = {"master": torch.arange(2000.0)}
    good = checkpoint.save(tmp_path, 1, state, keep=1)
    create = checkpoint._create
    monkeypatch.setattr(checkpoint, "_create", lambda path: FullDisk(create(path), room))
    with pytest.raises(CheckpointError, match=r"No space left on device.*the last good one is .*global_step_1"):
        checkpoint.save(tmp_path, 2, state, keep=1)
    assert checkpoint.latest(tmp_path) == good
    assert_same_bytes(checkpoint.load(good)["master"], state["master"])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]


def test_a_torn_checkpoint_is_an_error_with_its_name(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"a": torch.arange(100)}, keep=1)
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
