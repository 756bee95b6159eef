"""kill -9 of real processes at random moments, by the script that the documents name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.rl.tiny import write_tiny_run

ROOT = Path(__file__).parents[2]


def test_two_kills_at_random_moments_end_in_the_bytes_of_a_run_left_alone(tmp_path):
    config = write_tiny_run(tmp_path)
    command = [sys.executable, str(ROOT / "scripts" / "kill_a_run.py"), "--kills", "2", "--steps", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--config", str(config), "loop.off_policy_steps=1"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills in" in done.stdout
