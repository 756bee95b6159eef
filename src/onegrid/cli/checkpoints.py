"""Commands that read and write checkpoints: plan, convert, inspect, audit, import, export."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("recipe")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--to", "dialect", help="Print, as JSON, what says the same to vllm, sglang, te, hf, modelopt, ...")
def plan(recipe: str, model: Path, as_json: bool, dialect: str | None) -> None:
    """Print what RECIPE makes of every tensor of MODEL (a folder with config.json and safetensors).

    \b
    Example: onegrid plan mxfp8 configs/starts/moe
             onegrid plan mxfp8 configs/starts/moe --to vllm
    """
    from onegrid.cli.plan import run

    run(recipe, model, as_json=as_json, dialect=dialect)


@click.command()
@click.argument("source", type=click.Path(file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--recipe", required=True, help="A preset or a TOML file; bf16 converts back.")
@click.option(
    "--layout",
    type=click.Choice(["modelopt", "sglang", "compressed-tensors", "deepseek"]),
    help="Names and shapes of what is quantized (docs/commands.md); needed unless nothing is.",
)
@click.option("--shard-bytes", type=click.IntRange(min=1), default=5_000_000_000, help="A new file begins above it.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at TARGET.")
def convert(source: Path, target: Path, recipe: str, layout: str | None, shard_bytes: int, overwrite: bool) -> None:
    """Convert the checkpoint SOURCE to the formats of a recipe, in a published layout, into the folder TARGET.

    Run again after an interruption, it goes on with the same bytes.

    \b
    Example: onegrid convert configs/starts/dense dense-mxfp8 --recipe mxfp8 --layout modelopt
    """
    from onegrid.cli.convert import run

    run(source, target, recipe, layout=layout, shard_bytes=shard_bytes, overwrite=overwrite)


@click.command()
@click.argument("checkpoint", type=click.Path(file_okay=False, path_type=Path))
@click.option("--reference", type=click.Path(file_okay=False, path_type=Path), help="Print the error against it.")
@click.option("--full", is_flag=True, help="A line for every tensor.")
def inspect(checkpoint: Path, reference: Path | None, full: bool) -> None:
    """Print what CHECKPOINT holds: formats, grids, exclusions, sizes, and the error against a reference.

    \b
    Example: onegrid inspect dense-mxfp8 --reference configs/starts/dense
    """
    from onegrid.cli.inspect import run

    run(checkpoint, reference=reference, full=full)


@click.command()
@click.argument("checkpoint", type=click.Path(file_okay=False, path_type=Path))
@click.option("--recipe", required=True, help="A preset or a TOML file.")
@click.option("--engine", "engines", multiple=True, help="Only this reader, such as vllm-modelopt; may be repeated.")
@click.option("--full", is_flag=True, help="A line for every tensor.")
@click.option("--live", type=click.Choice(["vllm"]), help="Start this engine on CHECKPOINT and ask its modules.")
@click.option("--emulate", is_flag=True, help="With --live, on a CPU: let vLLM emulate MXFP8 and NVFP4 linears.")
def audit(checkpoint: Path, recipe: str, engines: tuple[str, ...], full: bool, live: str | None, emulate: bool) -> None:
    """Say tensor by tensor where CHECKPOINT, as stored and as engines read it, departs from a recipe.

    Exits with 1 if it does.

    \b
    Example: onegrid audit dense-mxfp8 --recipe mxfp8
    """
    if live is not None:
        from onegrid.cli.audit_live import run as run_live

        if run_live(checkpoint, recipe, emulate=emulate, full=full):
            raise SystemExit(1)
        return
    from onegrid.cli.audit import run

    if run(checkpoint, recipe, engines=engines, full=full):
        raise SystemExit(1)


@click.command("import")
@click.argument("source", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--shard-bytes", type=click.IntRange(min=1), default=5_000_000_000, help="A new file begins above it.")
def import_(source: Path, target: Path, shard_bytes: int) -> None:
    """Turn SOURCE (a .gguf file) into the folder TARGET: a BF16 checkpoint with its tokenizer and settings.

    \b
    Example: onegrid import SmolLM2-135M-Instruct.Q4_1.gguf configs/starts/smollm2
    """
    from onegrid.cli.import_ import run

    run(source, target, shard_bytes=shard_bytes)


@click.command()
@click.argument("checkpoint", type=click.Path(file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--adapter", is_flag=True, help="Write the adapter alone, as PEFT reads it (runs with learner.lora).")
def export(checkpoint: Path, target: Path, adapter: bool) -> None:
    """Write CHECKPOINT (a run, or a folder global_step_N of one) as a Hugging Face folder TARGET, in BF16.

    Adapters are merged.

    \b
    Example: onegrid export runs/quickstart-1 trained
    """
    from onegrid.cli.export import run

    run(checkpoint, target, adapter=adapter)


CHECKPOINTS = (plan, convert, inspect, audit, import_, export)
