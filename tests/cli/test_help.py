"""Help, completion and exit codes, as a person at a shell meets them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onegrid.cli import STOPPED, app
from onegrid.errors import ConfigError, StoppedError

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "src")}
HEAVY = ["torch", "numpy", "pyarrow", "rich", "transformers", "plotly", "jinja2", "wandb", "mlflow", "vllm", "sympy"]


def run(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Python with the package and nothing else of this environment."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | env)


def test_help_of_all_commands_loads_nothing_heavy():
    code = (
        "import sys, click; from onegrid.cli import app\n"
        "context = click.Context(app, info_name='onegrid')\n"
        "print(app.get_help(context))\n"
        "for name, command in app.commands.items():\n"
        "    print(command.get_help(click.Context(command, info_name=name, parent=context)))\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = run(code)
    assert done.stdout.rstrip().endswith("[]"), done.stdout[-200:] + done.stderr
    assert done.stdout.count("Usage: onegrid") == 1 + len(app.commands)


def test_importing_the_package_loads_no_engine_plotting_or_verifier():
    done = run(f"import sys, onegrid; print([name for name in {[*HEAVY, 'click']} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", sorted(app.commands))
def test_every_command_says_what_it_does_and_gives_an_example(name):
    text = app.commands[name].help or ""
    assert re.match(r"[A-Z][^\n]*", text.strip())
    assert "Example: onegrid" in text
    silent = [p.name for p in app.commands[name].params if p.param_type_name == "option" and not p.help]
    assert set(silent) <= {"layout"}, "an option whose choices say everything may be silent"


def test_the_exit_codes_of_the_help_are_those_of_the_documents_and_of_the_program(monkeypatch, capsys):
    from onegrid import cli

    table = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "commands.md").read_text(), re.M)
    assert table == re.findall(r"\b\d+\b", app.epilog or "") == ["0", "1", "2", str(STOPPED), "130"]
    for error, code in ((ConfigError("x"), 1), (StoppedError("SIGTERM"), STOPPED), (KeyboardInterrupt(), 130)):

        def fail(error=error, **options):
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(cli, "app", fail)
            with pytest.raises(SystemExit) as ended:
                cli.main()
        assert ended.value.code == code
        assert "Traceback" not in capsys.readouterr().err
    for args, code in ((["version", "--nothing"], 2), (["report", "nothing"], 1), (["completion", "zsh"], 0)):
        code_of = f"import sys; sys.argv = ['onegrid', *{args}]; from onegrid.cli import main; main()"
        assert run(code_of).returncode == code, args


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts_call_the_program_back(shell):
    done = run(f"import sys; sys.argv = ['onegrid', 'completion', '{shell}']; from onegrid.cli import main; main()")
    assert done.returncode == 0 and f"_ONEGRID_COMPLETE={shell}_complete" in done.stdout


def test_bash_completes_commands_and_options(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    program = tmp_path / "onegrid"
    program.write_text(f"#!{sys.executable}\nfrom onegrid.cli import main\nmain()\n")
    program.chmod(0o755)
    script = (
        "source <(onegrid completion bash)\n"
        "complete() { :; }\n"
        'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); '
        "_onegrid_completion onegrid; echo ${COMPREPLY[@]}; }\n"
        "ask onegrid re\nask onegrid report --o\nask onegrid completion f\n"
    )
    env = ENVIRONMENT | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout.splitlines()[-3:] == ["report", "--output", "fish"], done.stderr
