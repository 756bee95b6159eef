"""The start-up proof passes on this device, and sees what it is there to see."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from onegrid.errors import CapabilityError
from onegrid.ops import selftest
from onegrid.ops.pins import GPU_CHUNK, WORKSPACE, pin
from onegrid.ops.table import kernels_for

SHAPES = {
    "shapes": [(64, 32), (32, 64), (50, 96)],
    "stacked": [(48, 32), (32, 48)],
    "heads": (4, 2, 16),
    "vocabulary": 211,
    "max_rows": 256,
}


def test_pins_hold_on_this_device(device):
    kernels = kernels_for(device, num_heads=4, num_groups=2, head_dim=16)
    proof = selftest.self_test(**SHAPES, device=device, kernels=kernels)
    assert proof.passed, proof.failed
    selftest.require(proof)
    assert proof.as_record()["passed"] is True


@pytest.mark.parametrize("operation", ["matmul", "norm", "swiglu", "log_probs", "packed_attention", "attention"])
def test_an_operation_that_looks_at_its_batch_is_named(operation, monkeypatch):
    kernels = selftest.PLAIN
    in_kernels = hasattr(kernels, operation)
    real = getattr(kernels if in_kernels else selftest, operation)

    def spoiled(first, *rest, **named):
        return real(first, *rest, **named) + len(first.values if operation == "matmul" else first) * 2.0**-6

    if in_kernels:
        kernels = dataclasses.replace(kernels, **{operation: spoiled})
    else:
        monkeypatch.setattr(selftest, operation, spoiled)
    proof = selftest.self_test(**SHAPES, kernels=kernels)
    word = {"log_probs": "log-softmax", "packed_attention": "attention"}.get(operation, operation)
    assert any(name.startswith(word) for name in proof.failed)
    with pytest.raises(CapabilityError, match=word):
        selftest.require(proof)


def test_kernels_with_longer_chunks_are_proved_beyond_their_first_one():
    def slots(q_NHD, k_NGD, v_NGD, keys_SGLD, values_SGLD, position_N):
        keys, values = (x.transpose(1, 2) for x in (keys_SGLD, values_SGLD))
        out = selftest.attention(q_NHD[:, None], keys, values, position_N)[:, 0]
        return out * (1 + (wrong & (position_N >= GPU_CHUNK))[:, None, None])

    def draw(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()

    kernels = dataclasses.replace(selftest.PLAIN, slots=slots)
    wrong = False
    assert selftest._attention_failures(draw, (4, 2, 16), kernels) == []
    wrong = True
    found = selftest._attention_failures(draw, (4, 2, 16), kernels)
    assert found == [f"attention of 4/2 heads of 16, decode at position {GPU_CHUNK}"]


def test_logits_are_proved_for_as_many_rows_as_a_learner_takes_at_once(monkeypatch):
    seen = []

    def logits(x, head):
        seen.append(len(x))
        return x @ head.mT

    monkeypatch.setattr(selftest, "logits", logits)
    monkeypatch.setattr(selftest, "rows_at_once", lambda vocabulary, width: 320)
    selftest.self_test(**SHAPES | {"max_rows": 512})
    assert max(seen) == 320


def test_flushed_subnormals_are_named():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        # pin() switches flushing off again; spoil it after that
        monkey = selftest.pin
        selftest.pin = lambda device: torch.set_flush_denormal(True)
        assert "subnormal numbers are flushed to zero" in selftest.self_test(**SHAPES).failed
    finally:
        selftest.pin = monkey
        torch.set_flush_denormal(False)


def test_pins_are_set_whether_the_gpu_has_started_or_not(monkeypatch):
    for name in WORKSPACE:
        monkeypatch.setenv(name, "of another library")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    pin("cuda")
    assert {name: os.environ[name] for name in WORKSPACE} == WORKSPACE


LATE = """
import torch
x = torch.zeros(1 << 20, device="cuda")  # somebody has used the GPU, and multiplied nothing
from onegrid.ops import selftest
from onegrid.ops.table import kernels_for
selftest.require(
    selftest.self_test(
        [(4096, 4096), (4096, 12288), (6144, 4096)], heads=(32, 8, 128), vocabulary=4096, max_rows=512, device="cuda",
        kernels=kernels_for("cuda", num_heads=32, num_groups=8, head_dim=128),
    )
)
"""


def test_rows_are_independent_where_the_gpu_was_used_before_the_pins(gpu):
    environment = {name: value for name, value in os.environ.items() if name not in WORKSPACE}
    done = subprocess.run([sys.executable, "-c", LATE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
