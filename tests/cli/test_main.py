"""What a person sees at the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onegrid.errors import WeightsError

ROOT = Path(__file__).parent.parent.parent


def onegrid(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    code = "import sys; from onegrid.cli import main; sys.argv[0] = 'onegrid'; main()"
    env = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=env)


@pytest.mark.parametrize(
    "command", [(), ("train",), ("plan",), ("formats",), ("version",), ("eval",), ("import",), ("export",)]
)
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


def test_the_package_runs_as_a_module_with_the_same_exit_codes():
    env = {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    command = [sys.executable, "-m", "onegrid"]
    assert subprocess.run([*command, "--version"], capture_output=True, env=env).returncode == 0
    assert subprocess.run([*command, "nothing"], capture_output=True, env=env).returncode == 2


def test_formats_prints_every_quantizer_and_its_error_on_a_tensor(tmp_path, capsys):
    import torch
    from safetensors.torch import save_file

    from onegrid.cli.formats import run
    from onegrid.formats import QUANTIZERS

    save_file({"w": torch.randn(64, 128), "v": torch.zeros(3)}, tmp_path / "x.safetensors")
    run(f"{tmp_path / 'x.safetensors'}::w")
    printed = capsys.readouterr().out
    assert all(name in printed for name in QUANTIZERS)
    for bad, message in (("::v", "shape \\(3,\\)"), ("::none", "no tensor 'none'"), ("", "not FILE::NAME")):
        with pytest.raises(WeightsError, match=message):
            run(f"{tmp_path / 'x.safetensors'}{bad}")


def test_plan_prints_the_plan_of_a_folder(tmp_path):
    from tests.rl.tiny import write_tiny_run

    write_tiny_run(tmp_path)
    done = onegrid("plan", "mxfp8", str(tmp_path / "model"))
    assert done.returncode == 0 and "pairing: exact" in done.stdout
    done = onegrid("plan", "mxfp9", str(tmp_path / "model"))
    assert done.returncode == 1 and "mxfp8" in done.stderr


def test_a_dry_run_prints_everything_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    from onegrid.cli.train import run
    from tests.rl.tiny import write_tiny_run

    monkeypatch.chdir(tmp_path)
    path = write_tiny_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    run(path, ["learner.lr=0.25"], run_dir=None, num_steps=7, resume=False, dry_run=True)
    printed = capsys.readouterr().out
    for expected in (
        "lr = 0.25",
        "num_steps = 7",
        "pairing: exact",
        "memory estimate",
        "4 prompts x 4 samples",
        "answer '",
    ):
        assert expected in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_another_gpu_than_the_first_is_chosen_by_what_the_process_sees(monkeypatch):
    import torch

    from onegrid.errors import ConfigError
    from onegrid.study.parts import find_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [find_device(name) for name in ("auto", "cuda", "cuda:0", "cpu")] == ["cuda", "cuda", "cuda:0", "cpu"]
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=1 and device cuda"):
        find_device("cuda:1")


def test_a_device_that_is_not_there_is_refused_by_name():
    from onegrid.errors import ConfigError
    from onegrid.study.parts import find_device

    assert find_device("cpu") == "cpu"
    for name in ("tpu", "cuda:99", ""):
        with pytest.raises(ConfigError, match=f"device is '{name}'; here it can be auto, cpu"):
            find_device(name)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_what_the_system_refuses_ends_in_one_line(monkeypatch, capsys, error):
    from onegrid import cli

    def refused(**options):
        raise error

    monkeypatch.setattr(cli, "app", refused)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"onegrid: {error}\n"


def test_files_that_are_none_are_named(tmp_path):
    from onegrid.cli.formats import _read
    from onegrid.cli.plan import read_recipe
    from onegrid.errors import ConfigError, WeightsError
    from onegrid.rl.export import export_weights

    (tmp_path / "recipe.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"recipe\.toml is not TOML"):
        read_recipe(tmp_path / "recipe.toml")
    with pytest.raises(WeightsError, match="is no safetensors file"):
        _read(f"{tmp_path}::x")
    with pytest.raises(WeightsError, match="is a file; export into a new folder"):
        export_weights({}, tmp_path, tmp_path / "recipe.toml")
