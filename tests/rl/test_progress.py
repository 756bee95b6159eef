"""What a person sees is what was measured."""

from __future__ import annotations

import io

from rich.console import Console

from onegrid.rl.progress import HEADER, Display, evaluations, line

METRICS = {
    "rollout/raw_reward": 0.5,
    "rollout/response_length": 3.25,
    "mismatch/max_abs": 0.0,
    "guard/digest": 1,
    "guard/mismatch": -1,
    "perf/rollout_tokens_per_second": 1234.5,
    "perf/step_seconds": 0.512,
}


def test_a_line_has_the_columns_of_the_header_and_shows_a_gap_for_what_is_absent():
    assert line(7, METRICS).split() == ["7", "0.500", "3.2", "0", "1/2", "1234", "0.51"]
    assert line(7, {}).split() == ["7", "-", "-", "-", "-", "-", "-"]
    assert len(line(7, METRICS)) == len(line(123, {})) == len(HEADER)


def test_without_a_terminal_there_are_plain_lines_only():
    out = io.StringIO()
    with Display(3, console=Console(file=out, highlight=False)) as display:
        display.note("run [bold]a/b")
        display.step(1, METRICS)
        display.step(2, METRICS)
    assert out.getvalue() == "\n".join(["run [bold]a/b", HEADER, line(1, METRICS), line(2, METRICS), ""])


def test_a_step_that_was_judged_says_how_it_did():
    judged = {"eval/held_out/accuracy": 0.62, "eval/held_out/accuracy_low": 0.58, "eval/held_out/accuracy_high": 0.66}
    assert evaluations(METRICS) == []
    assert evaluations(judged) == ["      held out accuracy 0.620 (95 %: 0.580 to 0.660)"]
    assert evaluations({"eval/a_b/accuracy": 1}) == ["      a b accuracy 1.000"]
