"""What a person sees at the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def onegrid(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    code = "import sys; from onegrid.cli import main; sys.argv[0] = 'onegrid'; main()"
    env = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("command", [(), ("train",), ("plan",), ("formats",), ("version",)])
def test_help_tells_what_a_command_does_without_importing_torch(command):
    code = "import sys; from onegrid.cli import app; app(standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert "Usage:" in done.stdout and "Options:" in done.stdout
    assert done.stdout.strip().endswith("False")


def test_an_error_of_ours_is_its_message_alone_and_exit_code_1(tmp_path):
    done = onegrid("train", str(tmp_path / "none.toml"))
    assert done.returncode == 1
    assert done.stderr.startswith("onegrid: cannot read the configuration")
    assert "Traceback" not in done.stderr


def test_wrong_usage_is_exit_code_2():
    assert onegrid("train").returncode == 2
    assert onegrid("trian").returncode == 2


def test_the_version_is_printed():
    done = onegrid("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("onegrid 0.")
