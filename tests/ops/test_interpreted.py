"""Kernels at shapes that no model has, against the definitions: without a GPU, where Triton is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs a GPU, or the package triton for its interpreter"
)
def test_kernels_are_right_or_refuse_at_shapes_that_no_model_has():
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["attention", "decoding", "columns_and_codes", "chains", "experts", "moves", "steps"]
