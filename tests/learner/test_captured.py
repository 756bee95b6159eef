"""Micro-batches in CUDA graphs: buckets that hold them, and the bytes of those that run one launch at a time."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from onegrid.learner.captured import MicroBatches, bucket_rows, bucket_segments, refusal
from onegrid.learner.config import LearnerConfig, LoraConfig
from onegrid.ops.packed_attention import segments_of
from onegrid.ops.table import TRITON
from tests.bytes import assert_same_bytes
from tests.learner.test_learner import batch_of, learner_of


def test_buckets_hold_their_rows_and_are_few():
    for multiple in (1, 32, 128):
        for rows in range(1, 9000, 37):
            assert rows <= bucket_rows(rows, multiple) <= max(256, 1.26 * rows + 128)
            assert bucket_rows(rows, multiple) % multiple == 0
    assert len({bucket_rows(rows, 1) for rows in range(1, 8193)}) <= 40


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"capture": False}, "learner.capture is false"),
        ({"recompute": True}, "learner.recompute"),
        ({"weights": "codes"}, 'learner.weights = "codes"'),
        ({"lora": LoraConfig(rank=1)}, "learner.lora"),
        ({}, "the device is cpu"),
    ],
    ids=str,
)
def test_why_micro_batches_run_without_graphs_is_said_and_on_a_gpu_it_is_a_warning(change, why, monkeypatch):
    learner = learner_of("dense", "bf16")
    assert learner.captured is None
    learner.config = LearnerConfig(**{"capture": True} | change)
    if change:
        learner.device = torch.device("cuda")  # nothing is computed any more
    assert why in refusal(learner.config, learner.device, TRITON, learner.grad_weights)
    learner.live.kernels = TRITON
    loud = bool(change) and learner.config.capture
    with pytest.warns(UserWarning, match="without graphs, since learner") if loud else nullcontext():
        assert learner._capturing() is None


def test_segments_are_filled_up_with_empty_ones():
    segments = bucket_segments(segments_of([0, 70, 100], [70, 20, 5], 128, "cpu"))
    assert segments.length_B.tolist() == [70, 20, 5, 0] and segments.longest == 128


@pytest.mark.parametrize(
    ("model", "preset", "backward"),
    [
        ("dense", "bf16", None),
        ("dense", "mxfp8", "quantized"),
        ("dense", "mxfp8", "dequantized"),
        ("dense", "nvfp4_all", None),
        ("dense", "fp8_block", "quantized"),
        ("moe", "mxfp8", "quantized"),
        ("moe", "nvfp4_experts", None),
        ("shared", "bf16", None),
    ],
)
def test_captured_micro_batches_have_the_bytes_of_launches_one_by_one(model, preset, backward, gpu):
    found = []
    for capture in (True, False):
        learner = learner_of(model, preset, backward=backward, device=gpu, capture=True, max_tokens=256)
        if not capture:
            learner.captured.seen = _Never()
        logp = []
        for seed in range(4):
            report = learner.forward_backward(batch_of(20, seed=seed % 2))
            logp += report.logp
            learner.step()
        found.append((logp, [master.detach() for master in learner.masters.values()], len(learner.captured.runs)))
    assert found[0][2] > 0 and found[1][2] == 0
    for have, want in zip(found[0][:2], found[1][:2], strict=True):
        assert_same_bytes(have, want)


class _Never(set):
    """A bucket is never seen a second time, so nothing is captured."""

    def __contains__(self, key: object) -> bool:
        return False


def test_what_a_step_drops_is_captured_anew(gpu):
    learner = learner_of("dense", "mxfp8", device=gpu, capture=True)
    batch = batch_of(9)
    for _ in range(3):
        learner.forward_backward(batch)
        learner.clear_gradients()
    assert learner.captured.runs
    learner.forward_backward(batch)
    want = [master.grad.clone() for master in learner.masters.values()]
    learner.optimizer.zero_grad(set_to_none=True)  # as after a failure
    for _ in range(3):
        learner.forward_backward(batch)
        assert_same_bytes([master.grad for master in learner.masters.values()], want)
        learner.clear_gradients()
    torch.cuda.synchronize()


def test_gradients_of_a_capture_are_added_to_those_of_the_masters_in_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    learner = learner_of("dense", "mxfp8")
    batches, batch = MicroBatches(learner.grad_weights), batch_of(3)
    batches.begin()
    where = [master.grad.data_ptr() for master in learner.masters.values()]
    learner.forward_backward(batch)
    once = [master.grad.clone() for master in learner.masters.values()]
    with batches._leaves():
        assert not any(leaf is learner.masters[key] for key, leaf in learner.grad_weights.masters.items())
        learner.forward_backward(batch)
    assert learner.grad_weights.masters is learner.masters
    assert [master.grad.data_ptr() for master in learner.masters.values()] == where
    assert_same_bytes([master.grad for master in learner.masters.values()], [2 * grad for grad in once])


def test_a_capture_follows_a_backward_pass_of_which_something_is_left(gpu):
    learner = learner_of("dense", "mxfp8", device=gpu, capture=True)
    batch = batch_of(9)
    left = learner.forward(list(batch.sequences), 1.0)[0][0].sum()
    left.backward()  # its nodes live on, on the stream outside
    learner.clear_gradients()
    for _ in range(3):
        learner.forward_backward(batch)
        learner.clear_gradients()
    assert learner.captured.runs and left.grad_fn is not None
