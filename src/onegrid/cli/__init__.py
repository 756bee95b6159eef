"""The command line: one file per command, imported only when that command runs.

Exit codes: 0 done; 1 an error that the message explains; 2 wrong usage; 75 stopped by a signal with a checkpoint to go
on from; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from onegrid import __version__
from onegrid.cli.checkpoints import CHECKPOINTS
from onegrid.cli.group import Commands
from onegrid.cli.looking import LOOKING
from onegrid.errors import OnegridError, StoppedError

EPILOG = (
    "Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 75 stopped by a signal with a checkpoint "
    "to go on from, 130 interrupted."
)
STOPPED = 75
"""What sysexits.h calls a temporary failure: the same command with --resume succeeds. No shell uses it for a signal."""


@click.group(
    cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
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
@click.option("--rollouts-only", is_flag=True, help="Sample and score with the weights of the start; learn nothing.")
@click.option(
    "--train-only",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Learn from the rollouts of this run; sample nothing.",
)
def train(
    config: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    steps: int | None,
    resume: bool,
    dry_run: bool,
    rollouts_only: bool,
    train_only: Path | None,
) -> None:
    """Train by reinforcement learning as CONFIG (TOML) says.

    KEY=VALUE replaces one entry of the configuration by its dotted name, such as learner.lr=1e-4.

    SIGTERM, or Ctrl-C once, ends the run after the step at hand, with a checkpoint and exit code 75; --resume goes on.

    \b
    Example: onegrid train configs/quickstart.toml
             onegrid train configs/quickstart.toml learner.lr=1e-4 --steps 20 --run-dir runs/fast
             onegrid train configs/quickstart.toml --resume
    """
    from onegrid.cli.train import run

    debug = ["debug.rollouts_only=true"] * rollouts_only
    debug += [f"debug.train_only={train_only.resolve()}"] if train_only else []
    run(config, [*overrides, *debug], run_dir=run_dir, num_steps=steps, resume=resume, dry_run=dry_run)


@app.command()
@click.option("--tensor", metavar="FILE::NAME", help="Measure the error on this tensor of a safetensors file.")
def formats(tensor: str | None) -> None:
    """Print the number formats: bits, blocks, range, and the error of each on a tensor.

    \b
    Example: onegrid formats --tensor configs/starts/moe/model.safetensors::model.norm.weight
    """
    from onegrid.cli.formats import run

    run(tensor)


@app.command("eval")
@click.argument("checkpoint", type=click.Path(file_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="By default that of the run.")
@click.option("--against", type=click.Path(file_okay=False, path_type=Path), help="Compare with this checkpoint.")
@click.option("--problems", type=click.IntRange(min=1), help="By default eval.num_problems.")
@click.option("--samples", type=click.IntRange(min=0), default=8, show_default=True, help="Sampled answers a problem.")
@click.option("-k", "ks", type=click.IntRange(min=1), multiple=True, help="pass@k; by default 1 and --samples.")
@click.option("--json", "as_json", is_flag=True, help="Print one object of metrics.")
def evaluate(
    checkpoint: Path,
    overrides: tuple[str, ...],
    config: Path | None,
    against: Path | None,
    problems: int | None,
    samples: int,
    ks: tuple[int, ...],
    as_json: bool,
) -> None:
    """Judge CHECKPOINT on held-out problems: greedy accuracy and pass@k, with 95 % intervals.

    CHECKPOINT is a run, a folder global_step_N of one, or a folder with config.json (then --config names the task).

    \b
    Example: onegrid eval runs/quickstart-1 --samples 8 -k 1 -k 8
             onegrid eval runs/quickstart-1 --against configs/starts/moe
    """
    from onegrid.cli.eval import run

    run(
        checkpoint,
        overrides,
        config=config,
        against=against,
        problems=problems,
        samples=samples,
        ks=ks,
        as_json=as_json,
    )


@app.command()
@click.argument("parts", nargs=-1, metavar="[ops|sampler|learner|sync|linears|host|experts|pins]...")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@click.option("--model", "shape", default="tiny", show_default=True, help="Shape: tiny, qwen3-0.6b, qwen3-8b, ...")
@click.option("--presets", default="bf16,mxfp8", show_default=True, help="Recipes; bf16 first, for comparison.")
@click.option("--batches", default="32", show_default=True, help="Sequences at once, such as 32,256.")
@click.option("--prompt", default=128, show_default=True, help="Prompt tokens.")
@click.option("--new", default=32, show_default=True, help="New tokens.")
@click.option("--tokens", default=1024, show_default=True, help="Tokens of a learner's micro-batch.")
@click.option("--layers", type=int, help="Fewer layers than the model has.")
@click.option("--weights", default="auto", show_default=True, help="Of the sampler, such as auto,decoded,codes.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Also write rows to this file.")
def bench(
    parts: tuple[str, ...],
    device: str,
    shape: str,
    presets: str,
    batches: str,
    prompt: int,
    new: int,
    tokens: int,
    layers: int | None,
    weights: str,
    output: Path | None,
) -> None:
    """Measure speed on this machine: ratios of two things in one run. All parts, if none is named.

    ops: quantizers, attention and packed matmuls. sampler: decoding. learner: a micro-batch forward and backward, and
    whether its log-probabilities are the sampler's. sync: an update with every digest. linears: those of one layer.
    host: its time in a micro-batch. experts: a mixture in graphs. pins: the proof at start-up. Targets are an H200's
    and stand only beside a GPU.

    \b
    Example: onegrid bench learner sync --device cpu --layers 2
    """
    from onegrid.cli.bench import run

    run(
        parts,
        device=device,
        shape=shape,
        presets=presets,
        batches=batches,
        prompt=prompt,
        new=new,
        tokens=tokens,
        layers=layers,
        weights=weights,
        output=output,
    )


@app.command()
@click.argument("checkpoint", type=click.Path(file_okay=False, path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="By default that of the run.")
@click.option("--older", type=click.Path(file_okay=False, path_type=Path), help="A version before, as a suspect.")
@click.option("--calibrate", type=click.Path(dir_okay=False, path_type=Path), help="Measure, and write this file.")
@click.option("--steps", type=click.IntRange(min=20), default=40, show_default=True, help="Of a calibration.")
def diagnose(
    checkpoint: Path,
    overrides: tuple[str, ...],
    config: Path | None,
    older: Path | None,
    calibrate: Path | None,
    steps: int,
) -> None:
    """Say why learner and sampler differ at CHECKPOINT, by replaying a batch with one thing changed at a time.

    CHECKPOINT is a run, a folder global_step_N of one, or a folder with config.json (then --config names the task).
    With --calibrate it measures what a pairing that is not exact differs by, for guard.calibration.

    \b
    Example: onegrid diagnose runs/quickstart-1
             onegrid diagnose runs/mixed --calibrate mixed.json
    """
    from onegrid.cli.diagnose import run

    run(checkpoint, overrides, config=config, older=older, calibrate=calibrate, steps=steps)


@app.command()
@click.argument("names", nargs=-1, metavar="[FAULT]...")
@click.option("--list", "show", is_flag=True, help="Print every fault, what it breaks and which checks must object.")
@click.option("--campaign", type=click.Choice(["quick", "full"]), help="All faults, 100 or 1000 random corruptions.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of what is random.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows here.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write the tables, as Markdown, here.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Keep what is done here, and go on.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or auto; a GPU kills no runs.")
@click.option("--weights", default="auto", show_default=True, help="sampler.weights: auto, decoded or codes.")
def faults(
    names: tuple[str, ...],
    show: bool,
    campaign: str | None,
    seed: int,
    json_file: Path | None,
    page: Path | None,
    work: Path | None,
    device: str,
    weights: str,
) -> None:
    """Put faults into the real loop and see which checks catch them.

    Exits with 1 if one gets through, is named wrongly, or a check objects without a fault.

    \b
    Example: onegrid faults --list
             onegrid faults lm_head_quantized --json faults.json
    """
    from onegrid.cli.faults import list_faults, run

    if campaign and names:
        raise click.UsageError("a campaign tries all faults: name some, or give --campaign, not both")
    if show:
        list_faults()
    elif campaign or names:
        run(campaign, names, seed=seed, json_file=json_file, page=page, work=work, device=device, weights=weights)
    else:
        raise click.UsageError("name faults, or give --campaign or --list")


@app.command()
@click.argument("checkpoint", type=click.Path(file_okay=False, path_type=Path))
@click.option("--recipe", required=True, help="A preset or a TOML file; that of the learner.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind; any but loopback needs a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--token-file", type=click.Path(dir_okay=False, path_type=Path), help="File that holds the token.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@click.option("--max-slots", type=click.IntRange(min=1), default=128, show_default=True, help="Completions at once.")
@click.option("--max-len", type=click.IntRange(min=1), default=1024, show_default=True, help="Prompt and response.")
@click.option("--weights", default="auto", show_default=True, help="sampler.weights: auto, decoded or codes.")
@click.option("--max-body-mib", type=click.IntRange(min=1), default=256, show_default=True, help="Of one request.")
@click.option("--update-seconds", type=float, default=60.0, show_default=True, help="Silence that ends an update.")
@click.option(
    "--engine", type=click.Choice(["embedded", "vllm"]), default="embedded", show_default=True, help="What samples."
)
@click.option(
    "--road",
    type=click.Choice(["decoded", "online", "modelopt", "compressed-tensors", "deepseek"]),
    default="decoded",
    show_default=True,
    help="How weights go into vLLM; see sampler.vllm.road.",
)
def serve(
    checkpoint: Path,
    recipe: str,
    host: str,
    port: int,
    token_file: Path | None,
    device: str,
    max_slots: int,
    max_len: int,
    weights: str,
    max_body_mib: int,
    update_seconds: float,
    engine: str,
    road: str,
) -> None:
    """Serve CHECKPOINT over HTTP: as the sampler of a training elsewhere, and through the OpenAI API.

    A training reaches it with sampler.engine=remote sampler.remote.url=http://HOST:PORT. There is no encryption: across
    a network that others share, put a proxy or a tunnel in front.

    \b
    Example: onegrid serve configs/starts/moe --recipe mxfp8
    """
    from onegrid.cli.serve import run

    run(
        checkpoint,
        recipe,
        host=host,
        port=port,
        token_file=token_file,
        device=device,
        max_slots=max_slots,
        max_len=max_len,
        weights=weights,
        max_body_mib=max_body_mib,
        update_seconds=update_seconds,
        engine=engine,
        road=road,
    )


@app.command()
def version() -> None:
    """Print the versions of onegrid and of what its results depend on.

    \b
    Example: onegrid version
    """
    from onegrid.cli.version import run

    run()


for _command in (*CHECKPOINTS, *LOOKING):
    app.add_command(_command)


def main() -> None:
    """Entry point of `onegrid`: errors that users can meet end in their message alone."""
    try:
        app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except StoppedError as error:
        print(f"onegrid: stopped by {error}", file=sys.stderr)
        raise SystemExit(STOPPED) from None
    except OnegridError as error:
        print(f"onegrid: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:  # the reader of a pipe has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        print(f"onegrid: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except (click.Abort, KeyboardInterrupt):
        print("onegrid: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
