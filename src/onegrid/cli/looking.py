"""Commands that look at things and change none of them: report, watch, doctor, config, completion."""

from __future__ import annotations

from pathlib import Path

import click

FOLDER = click.Path(file_okay=False, path_type=Path)
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("runs", nargs=-1, required=True, type=FOLDER, metavar="RUN...")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="By default report.html in the run, or here if there are several.",
)
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write one HTML page about a run, or several runs over each other.

    The page holds everything and loads nothing from a network. A run in progress or cut short gets one too, which says
    what is missing.

    \b
    Example: onegrid report runs/quickstart-1
             onegrid report runs/mxfp8-1 runs/bf16-1 -o both.html
    """
    from onegrid.report.page import write_report

    output = output or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    for sentence in write_report(runs, output):
        click.echo(f"missing: {sentence}")
    click.echo(output)


@click.command()
@click.argument("run", type=FOLDER)
@click.option("--once", is_flag=True, help="Print what there is now, and end.")
@click.option("--every", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="Seconds between looks.")
def watch(run: Path, once: bool, every: float) -> None:
    """Show a run in the terminal while it trains: headline, curves, checks, incidents. Ctrl-C ends the watching alone.

    \b
    Example: onegrid watch runs/quickstart-1
             onegrid watch runs/quickstart-1 --once
    """
    from onegrid.report.watch import watch as look

    look(run, once=once, every=every)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
def doctor(as_json: bool, device: str) -> None:
    """Say what this machine can run: device, formats, the order of sums, libraries, memory and disk.

    Exits with 1 if something that every run needs is broken.

    \b
    Example: onegrid doctor
             onegrid doctor --json
    """
    from onegrid.cli.doctor import run

    if not run(device, as_json=as_json):
        raise SystemExit(1)


@click.command()
@click.argument("section", required=False)
@click.option("--markdown", is_flag=True, help="Print the page docs/configuration.md.")
def config(section: str | None, markdown: bool) -> None:
    """Print every key of a configuration, or those of SECTION: type, default, meaning.

    \b
    Example: onegrid config learner
             onegrid config --markdown
    """
    from onegrid.cli.reference import run

    run(section, markdown=markdown)


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    \b
    Example: onegrid completion bash >> ~/.bashrc
             onegrid completion zsh >> ~/.zshrc
             onegrid completion fish > ~/.config/fish/completions/onegrid.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # click has all of SHELLS
    root = click.get_current_context().find_root()
    click.echo(found(root.command, {}, "onegrid", "_ONEGRID_COMPLETE").source())


LOOKING = (report, watch, doctor, config, completion)
