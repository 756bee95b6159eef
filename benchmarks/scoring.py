"""How much of a step is waiting for rewards, where half of 512 answers need a computer algebra.

    python benchmarks/scoring.py [CONFIG] [--steps N] [--new TOKENS] [--workers N]

The sampler really generates (up to TOKENS for each completion, which ends at one of the digits), the learner really
learns; only the text that is scored is made up: expressions with radicals, half of them right, so that math-verify has
work. Once scoring begins as groups end, once when all have ended. The first step, in which the processes start, is left
out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from onegrid.config import load_config
from onegrid.guard.guard import guard_of
from onegrid.rl.custom import Item
from onegrid.rl.progress import Display
from onegrid.rl.record import Record, read_metrics
from onegrid.rl.scoring import Pending, Scoring, ScoringConfig
from onegrid.rl.tasks import Prompt
from onegrid.study.parts import build, design, train_parts

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"


class Expressions:
    """The problems of another task, with answers made up for their completions."""

    def __init__(self, task: Any, workers: int) -> None:
        self.prompts, self.held_out, self.score = task.prompts, task.held_out, task.score
        self.scoring = Scoring(ScoringConfig(workers=workers))

    def submit(self, answered: Sequence[tuple[Prompt, str]]) -> Pending:
        """A label for the prompt, and for each completion an answer that no text comparison can judge."""
        n = answered[0][0].prompt_index
        a, b = n % 13 + 2, n % 7 + 2
        label = rf"{a}\sqrt{{{b}}}+{n}"
        texts = [
            rf"\boxed{{{n}+{a}\sqrt{{{b}}}}}" if i % 2 else rf"\boxed{{{n + i}\sqrt{{{b + i}}}-{i}}}"
            for i in range(len(answered))
        ]
        return self.scoring.submit(
            [Item(completion=text, prompt="", data_source="made", ground_truth=label) for text in texts]
        )


def shares(path: Path, *, num_steps: int, new: int, workers: int, overlap: bool) -> list[tuple[float, float, float]]:
    """(seconds of waiting for rewards, of rollouts with them, of the step) of every step but the first."""
    settings = [f"loop.num_steps={num_steps}", f"sampling.max_new_tokens={new}", "sampling.stop_token_ids=[5]"]
    settings += [f"sampler.max_len={new + 16}", "sampler.max_slots=128", "loop.prompts_per_step=64"]
    settings += ["loop.samples_per_prompt=8", "eval.num_problems=1", "checkpoint.every=0", "loop.reference_every=0"]
    plan = design(load_config(path, settings), path.parent)
    parts = build(plan)
    task = Expressions(parts.task, workers)
    generate = parts.sampler.generate
    if not overlap:
        parts.sampler.generate = lambda requests, on_finished=None: generate(requests)  # type: ignore[method-assign]
    try:
        with TemporaryDirectory() as folder:
            train_parts(
                replace(parts, task=task),
                plan.config,
                guard=guard_of(plan.config.guard, parts.learner, parts.sampler),
                record=Record(Path(folder), config=plan.config.record),
                display=Display(num_steps, console=Console(quiet=True)),
            )
            lines: list[dict[str, Any]] = read_metrics(Path(folder))[2:]
    finally:
        task.scoring.close()
    keys = ("perf/scoring_seconds", "perf/rollout_seconds", "perf/step_seconds")
    return [(line[keys[0]], line[keys[1]], line[keys[2]]) for line in lines]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    for overlap in (False, True):
        found = shares(given.config, num_steps=given.steps, new=given.new, workers=given.workers, overlap=overlap)
        waited, rollouts, steps = (sum(column) / len(found) for column in zip(*found, strict=True))
        print(
            f"scoring {'as groups end' if overlap else 'after all ended'}: waits {waited:.2f} s of a step of "
            f"{steps:.2f} s ({waited / steps:.1%}), rollouts {rollouts:.2f} s"
        )


if __name__ == "__main__":
    main()
