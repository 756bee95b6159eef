"""The digest's kernel gives the integers of its definition: in Triton's interpreter here, compiled on a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

CODE = """
import numpy as np, torch
from onegrid.formats.digest import CHUNK, weighted_sum
from onegrid.formats.digest_triton import triton_weighted_sum
np.seterr(over="ignore")  # sums modulo 2^64 are what is wanted
generator = torch.Generator().manual_seed(0)
for chunks in (1, 63, 64, 65, 130):
    data = torch.randint(0, 256, (chunks, CHUNK), dtype=torch.uint8, generator=generator)
    weight = torch.randint(-2**62, 2**62, (chunks,), generator=generator)
    assert int(triton_weighted_sum(data, weight)) == int(weighted_sum(data, weight)), chunks
print("equal")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs a GPU, or the package triton for its interpreter"
)
def test_the_kernel_adds_the_same_integers_in_the_interpreter():
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]


def test_a_large_tensor_on_a_gpu_has_the_digest_of_its_copy(gpu):
    from onegrid.formats import digest, digests

    x = torch.randn(5000, 4097).to(torch.bfloat16)
    parts = [(x.to(gpu), "codes"), (x[:3].contiguous().to(gpu), "values"), (x[1:].to(gpu), "scales")]
    assert digests(parts) == [digest(t.cpu(), role=role) for t, role in parts]
    assert digest(x.to(gpu).view(torch.uint8).flatten()[5:], start=5) == digest(
        x.view(torch.uint8).flatten()[5:], start=5
    )
