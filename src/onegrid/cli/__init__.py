"""The command line: one file per command, imported only when that command runs.

Exit codes: 0 done; 1 an error that the message explains; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from onegrid import __version__
from onegrid.errors import OnegridError

EPILOG = "Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 130 interrupted."


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "--version", message="%(prog)s %(version)s")
def app() -> None:
    """Reinforcement learning of language models in low precision, with learner and sampler provably one policy."""


@app.command()
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--run-dir", type=click.Path(file_okay=False, path_type=Path), help="Where the run is recorded.")
@click.option("--steps", type=click.IntRange(min=0), help="Short for loop.num_steps=N.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of the run directory.")
@click.option("--dry-run", is_flag=True, help="Print configuration, plan, memory and steps; train nothing.")
def train(
    config: Path, overrides: tuple[str, ...], run_dir: Path | None, steps: int | None, resume: bool, dry_run: bool
) -> None:
    """Train by reinforcement learning as CONFIG (TOML) says.

    KEY=VALUE replaces one entry of the configuration by its dotted name, such as learner.lr=1e-4.
    """
    from onegrid.cli.train import run

    run(config, overrides, run_dir=run_dir, num_steps=steps, resume=resume, dry_run=dry_run)


@app.command()
@click.argument("recipe")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(recipe: str, model: Path, as_json: bool) -> None:
    """Print what RECIPE makes of every tensor of MODEL (a folder with config.json and safetensors)."""
    from onegrid.cli.plan import run

    run(recipe, model, as_json=as_json)


@app.command()
@click.option("--tensor", metavar="FILE::NAME", help="Measure the error on this tensor of a safetensors file.")
def formats(tensor: str | None) -> None:
    """Print the number formats: bits, blocks, range, and the error of each on a tensor."""
    from onegrid.cli.formats import run

    run(tensor)


@app.command()
def version() -> None:
    """Print the versions of onegrid and of what its results depend on."""
    from onegrid.cli.version import run

    run()


def main() -> None:
    """Entry point of `onegrid`: errors that users can meet end in their message alone."""
    try:
        app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except OnegridError as error:
        print(f"onegrid: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except (click.Abort, KeyboardInterrupt):
        print("onegrid: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
