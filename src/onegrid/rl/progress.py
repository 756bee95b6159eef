"""What a person sees while a run goes on: one line a step, and a bar with the time left on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

HEADER = f"{'step':>5} {'reward':>7} {'length':>7} {'mismatch':>10} {'checks':>7} {'tokens/s':>9} {'s/step':>7}"


class Display:
    """Prints the steps of a run; without a terminal only plain lines.

    num_steps  steps of the whole run
    done       steps that were done before, by the run that is resumed
    """

    def __init__(self, num_steps: int, *, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._printed_header = False
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True)
        self._task = self._bar.add_task("training", total=num_steps, completed=done)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """One line of text, above the bar."""
        self.console.print(text, soft_wrap=True, markup=False)

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """The line of one step; what was not measured is shown as "-"."""
        if not self._printed_header:
            self.note(HEADER)
            self._printed_header = True
        self.note(line(step, metrics))
        for text in evaluations(metrics):
            self.note(text)
        self._bar.update(self._task, completed=step)


def line(step: int, metrics: Mapping[str, object]) -> str:
    """One step in the columns of HEADER. The mismatch is the largest difference of two log-probabilities, in nats."""
    checks = [value for key, value in metrics.items() if key.startswith("guard/")]
    passed = sum(value == 1 for value in checks)
    cells = [
        f"{step:>5}",
        _cell(metrics.get("rollout/raw_reward"), 7, ".3f"),
        _cell(metrics.get("rollout/response_length"), 7, ".1f"),
        _cell(metrics.get("mismatch/max_abs"), 10, ".3g"),
        f"{f'{passed}/{len(checks)}' if checks else '-':>7}",
        _cell(metrics.get("perf/rollout_tokens_per_second"), 9, ".0f"),
        _cell(metrics.get("perf/step_seconds"), 7, ".2f"),
    ]
    return " ".join(cells)


def evaluations(metrics: Mapping[str, object]) -> list[str]:
    """A line for every set of problems that was judged in this step: its accuracy, with the interval where there is."""
    lines = []
    for key, value in metrics.items():
        if key.startswith("eval/") and key.endswith("/accuracy") and isinstance(value, int | float):
            low, high = (metrics.get(f"{key}_{end}") for end in ("low", "high"))
            known = isinstance(low, int | float) and isinstance(high, int | float)
            name = key.removeprefix("eval/").removesuffix("/accuracy").replace("_", " ")
            lines.append(f"      {name} accuracy {value:.3f}" + (f" (95 %: {low:.3f} to {high:.3f})" if known else ""))
    return lines


def _cell(value: object, width: int, spec: str) -> str:
    return f"{value:{spec}}".rjust(width) if isinstance(value, int | float) else "-".rjust(width)
