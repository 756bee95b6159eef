"""The digest's kernel gives the integers of its definition: in Triton's interpreter here, compiled on a GPU. What a GPU
does for many tensors at once, it does here too."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onegrid.formats.digest import CHUNK, GROUP, MASK, ROLES, _in_few_launches, _present, digest

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


def pieces_of(sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        (i, ROLES[i % 4], torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))
        for i, size in enumerate(sizes)
    ]


def test_many_tensors_in_few_launches_have_the_digests_that_they_have_alone(monkeypatch):
    around = (1, 7, 8, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, GROUP * CHUNK - 1, GROUP * CHUNK, GROUP * CHUNK + 5)
    pieces = pieces_of([size for size in around for _ in ROLES])
    pieces += [(i + len(pieces), role, data) for i, role, data in pieces_of([5 * CHUNK + 3] * 8)]
    monkeypatch.setattr(sys.modules["onegrid.formats.digest"], "TOGETHER", 11)  # more than one run
    found = {owner: _present(0, len(data), role) for owner, role, data in pieces}
    for owner, value in _in_few_launches(pieces):
        found[owner] += value
    assert {i: value & MASK for i, value in found.items()} == {i: digest(x, role=role) for i, role, x in pieces}
    assert list(_in_few_launches([])) == []


def test_small_tensors_cost_no_launch_each_and_one_look_at_the_device():
    class Count(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.made += function.__name__.split(".")[0] not in ("view", "slice", "empty", "detach")
            return function(*arguments, **(options or {}))

    counts = []
    for number in (2, 40):
        pieces = pieces_of([3 * 512] * number)
        with Count() as count:
            list(_in_few_launches(pieces))
        counts.append(count.made)
    assert counts[0] == counts[1] < 12
