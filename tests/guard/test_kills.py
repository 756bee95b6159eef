"""A process that dies in a synchronization leaves nothing mixed, and its run ends in the same bytes."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from pathlib import Path
import torch._dynamo  # once, and not in every child
from onegrid.study.kills import run_kills
kills = run_kills(1, 11, Path(sys.argv[1]))
print(kills.same, kills.killed, kills.different)
"""


def test_kill_9_in_a_synchronization_then_resume_ends_in_the_same_bytes(tmp_path):
    # a process of its own, because this one may have run a backward pass, which does not survive a fork
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == ["1", "1"], done.stdout
