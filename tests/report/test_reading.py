"""What is taken from a run directory, before any browser: facts, lights, curves, the picture of the plan, samples."""

from __future__ import annotations

import io
import json
import random

import pytest
from rich.console import Console

from onegrid.errors import CheckpointError
from onegrid.report.charts import MAX_POINTS, charts, running_mean, thin
from onegrid.report.facts import facts, mismatch, number
from onegrid.report.lights import MAX_LIGHTS, rows
from onegrid.report.network import picture
from onegrid.report.reading import Run, read_run, read_runs
from onegrid.report.samples import samples
from onegrid.report.watch import spark, view, watch
from tests.report.runs import add_incident, line, write_run


def append(folder, **fields):
    """One more line of metrics.jsonl."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(fields) + "\n")


def shown(folder, width=100):
    """What `watch --once` prints."""
    console = Console(file=io.StringIO(), width=width)
    watch(folder, once=True, every=1.0, console=console)
    return console.file.getvalue()


def test_a_running_mean_looks_back_and_never_ahead():
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert running_mean([1.0, 3.0, 5.0, 100.0], 3)[:3] == [1.0, 2.0, 3.0]


def test_a_thinned_line_keeps_ends_and_extremes_and_its_order():
    steps = list(range(1, 10_001))
    values = [float(step % 7) for step in steps]
    values[6543], values[1234] = 99.0, -99.0
    kept, found = thin(steps, values)
    assert len(kept) <= MAX_POINTS + 2
    assert kept == sorted(set(kept)) and (kept[0], kept[-1]) == (1, 10_000)
    assert {99.0, -99.0} <= set(found)
    assert all(values[step - 1] == value for step, value in zip(kept, found, strict=True))
    assert thin(steps[:5], values[:5]) == (steps[:5], values[:5])


def test_a_later_line_of_the_same_step_wins_and_what_is_no_number_is_not_measured(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4)
    append(folder, step=4, **{"train/entropy": 9.5, "train/odd": "text", "train/true": True})
    run = read_run(folder)
    assert [line["step"] for line in run.lines] == [0, 1, 2, 3, 4]
    assert run.series("train/entropy")[1][-1] == 9.5
    assert run.series("train/odd") == run.series("train/true") == run.series("train/none") == ([], [])


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name / "run-1", num_steps=4) for name in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["a/run-1", "b/run-1"]
    with pytest.raises(CheckpointError, match="neither"):
        read_runs([tmp_path / "a"])


def test_lights_show_the_worst_of_their_steps_and_the_incident_that_ended_the_run(tmp_path):
    def turn(step, metrics):
        if step == 300:
            metrics["guard/digest"] = 0
        if step == 100:
            metrics["guard/sentinel"] = -1
        del metrics["guard/probe"]

    folder = write_run(tmp_path / "run", num_steps=400, done=399, change=turn)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("off = []", 'off = ["probe"]'))
    add_incident(folder, step=400, check="bytes")
    by_name = {row.check: row for row in rows(read_run(folder))}
    assert all(len(row.lights) <= MAX_LIGHTS for row in by_name.values())
    assert by_name["digest"].counts == {"passed": 398, "failed": 1, "could not tell": 0}
    assert sum(light.state == "failed" for light in by_name["digest"].lights) == 1
    assert sum(light.state == "could not tell" for light in by_name["sentinel"].lights) == 1
    assert by_name["bytes"].lights[-1].state == "failed", "the step that was not finished has a light too"
    assert by_name["probe"].off and by_name["probe"].summary == "switched off by the configuration"
    assert not by_name["digest"].off


def test_checks_count_incidents_that_left_no_metric(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4, done=3)
    add_incident(folder, step=4)
    fact = next(fact for fact in facts(read_run(folder)) if fact.label == "Checks")
    assert (fact.exact, fact.tone) == ((24, 25), "bad") and "1 failed" in fact.detail


def test_a_mismatch_of_zero_is_called_equal_only_where_bytes_were_compared(tmp_path):
    def no_bytes(step, metrics):
        del metrics["mismatch/share_equal"]

    def not_counted(step, metrics):
        del metrics["mismatch/tokens"]

    assert "all equal" in mismatch(read_run(write_run(tmp_path / "a", num_steps=4))).detail
    assert (
        "whether as bytes is not recorded"
        in mismatch(read_run(write_run(tmp_path / "b", num_steps=4, change=no_bytes))).detail
    )
    assert (
        "log-probs (not counted)"
        in mismatch(read_run(write_run(tmp_path / "c", num_steps=4, change=not_counted))).detail
    )


def test_a_mismatch_where_none_may_be_is_bad_and_says_where(tmp_path):
    def apart(step, metrics):
        if step == 3:
            metrics |= {"mismatch/max_abs": 1.25e-3, "mismatch/share_equal": 0.5}

    fact = mismatch(read_run(write_run(tmp_path / "run", num_steps=4, change=apart)))
    assert (fact.value, fact.tone, fact.exact) == ("0.00125 nats", "bad", (1.25e-3,))
    for words in ("largest, in step 3", "the plan promises equal bits", "50 % or more equal in every step"):
        assert words in fact.detail


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (12.0, "12"),
        (0.6269531, "0.627"),
        (1234.5, "1,234"),
        (1.5e-7, "1.5e-07"),
        (-0.25, "-0.250"),
        (3e12, "3e+12"),
    ],
)
def test_numbers_read_as_a_person_writes_them(value, text):
    assert number(value) == text


def test_the_picture_has_a_cell_for_every_tensor_and_says_where_experts_differ(tmp_path):
    plan = json.loads((write_run(tmp_path / "run", num_steps=4) / "plan.json").read_text())
    whole = picture(plan)
    assert whole is not None and not whole.mixed
    assert [name for name, _ in whole.rows] == ["0", "1"]
    assert sum(n for _, _, n, _ in whole.legend) == len(plan["tensors"])
    assert sum(share for *_, share in whole.legend) == pytest.approx(1.0, abs=1e-12)
    expert = next(t for t in plan["tensors"] if "layers.1" in t["name"] and "experts.2.up_proj" in t["name"])
    expert["weight"] = expert["activation"] = None
    changed = picture(plan)
    assert changed is not None and changed.mixed, "the sampler still has the format"
    cells = dict(zip(changed.columns, dict(changed.rows)["1"], strict=True))
    cell = cells["mlp.experts.up_proj"]
    assert cell.label == cell.family == "mixed" and "1 experts: weight bf16" in cell.text
    assert picture({}) is None and picture({"tensors": []}) is None


def test_samples_have_the_text_of_every_token_and_mark_where_a_version_turns(tmp_path):
    missing: list[str] = []
    groups = samples(read_run(write_run(tmp_path / "run")), missing)
    assert missing == []
    assert [group[0].step for group in groups] == [4, 4, 8, 8, 12, 12]
    first = groups[0][0]
    assert "".join(token.text for token in first.tokens[:3]).isdigit() and first.tokens[3].text == "[2]"
    assert [token.turns for token in first.tokens] == [False, False, True, False]
    assert first.versions == "3 to 4" and first.total == pytest.approx(sum(token.logp for token in first.tokens))
    assert {sample.reward for sample in groups[0]} == {0.0, 1.0}, "the group that teaches something comes first"
    assert groups[1][1].reward is None
    assert groups[0][0].truth.endswith("#### 0") and "\n" not in groups[0][0].truth


def test_each_of_several_rewards_has_a_line(tmp_path):
    def two(step, metrics):
        metrics |= {"rollout/reward/exact": step / 10, "rollout/reward/brief": 1.0}

    (chart,) = [c for c in charts([read_run(write_run(tmp_path / "run", change=two))]) if c["id"] == "rewards"]
    assert [(s["name"], s["y"][:2]) for s in chart["series"]] == [("brief", [1.0, 1.0]), ("exact", [0.1, 0.2])]
    assert not [c for c in charts([read_run(write_run(tmp_path / "one"))]) if c["id"] == "rewards"]


def test_tokens_are_numbers_where_the_tokenizer_is_gone(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4)
    (tmp_path / "model" / "characters.json").unlink()
    missing: list[str] = []
    groups = samples(read_run(folder), missing)
    assert "shown as numbers" in missing[0]
    assert all(token.text.startswith("[") for token in groups[0][0].tokens)


def test_watch_prints_the_numbers_of_the_record_at_any_width(tmp_path):
    folder = write_run(tmp_path / "run", done=5)
    reward = read_run(folder).series("rollout/raw_reward")[1]
    for width in (60, 100, 200):
        text = shown(folder, width)
        assert f"{reward[0]:.3f} → {reward[-1]:.3f}" in text
        assert "5 of 12" in text and "5 passed" in text and "480 log-probs" in " ".join(text.split())
        assert all(len(line) <= width for line in text.splitlines())


def test_watch_shows_hostile_text_as_text_and_says_what_is_missing(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4)
    add_incident(folder, step=2, text="[red]not markup[/red]")
    (folder / "versions.json").unlink()
    text = shown(folder)
    assert "[red]not markup[/red]" in text and "missing: versions.json" in text


def test_watch_draws_again_until_the_last_step(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", num_steps=5, done=4)
    looks = []

    def wait(seconds):
        looks.append(seconds)
        append(folder, step=4 + len(looks), **{"rollout/raw_reward": 0.5})

    monkeypatch.setattr("onegrid.report.watch.time.sleep", wait)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    watch(folder, once=False, every=3.5, console=console)
    assert looks == [3.5]
    assert "5 of 5" in console.file.getvalue()


def test_bars_have_the_shape_of_the_values():
    assert spark([0.0, 1.0], 10) == "▁█"
    assert spark([2.0] * 3, 10) == "▁▁▁"
    assert spark([float(i) for i in range(800)], 8) == "▁▂▃▄▅▆▇█"


def test_a_long_run_loses_no_rare_stage_and_no_peak_of_a_layer(tmp_path):
    rng, lines = random.Random(0), []
    for step in range(1, 1601):
        lines.append({"step": step, **line(step, rng), "perf/eval_seconds": 60.0 if step % 100 == 0 else 0.0})
    lines[1500]["train/grad_norm/layers.1"] = 88.0
    run = Run(name="run", folder=tmp_path, lines=lines)
    found = {chart["id"]: chart for chart in charts([run])}
    stages = {series["key"]: series["y"] for series in found["stages-0"]["series"]}
    assert len(stages["perf/eval_seconds"]) == 400 and sum(stages["perf/eval_seconds"]) * 4 == 16 * 60
    assert "mean of 4 steps" in found["stages-0"]["note"]
    heat = found["layers-0"]
    assert max(heat["z"][heat["y"].index("layers.1")]) == 88.0 and "largest of 4 steps" in heat["note"]


def test_pass_at_k_is_drawn_with_its_interval_where_it_was_measured(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=4)
    assert "passes" not in [chart["id"] for chart in charts([read_run(folder)])]
    key = "eval/held_out/pass_at_"
    append(
        folder,
        step=4,
        **{f"{key}{k}{end}": v for k in (16, 2) for end, v in (("", 0.5), ("_low", 0.25), ("_high", 1.0))},
    )
    chart = next(chart for chart in charts([read_run(folder)]) if chart["id"] == "passes")
    assert [series["name"] for series in chart["series"]] == ["pass@2", "pass@16"]
    assert (chart["series"][0]["below"], chart["series"][0]["above"]) == ([0.25], [0.5])


def test_a_run_without_any_step_can_be_looked_at(tmp_path):
    folder = write_run(tmp_path / "run", done=0)
    run = read_run(folder)
    assert "No training step is done yet." in run.missing
    assert all(not chart.get("series") or chart["id"] == "reward" for chart in charts([run]))
    assert "0 of 12" in shown(folder)
    assert view(run, 60)


def test_numbers_that_nothing_draws_and_nests_without_end_are_left_out_and_said(tmp_path):
    folder = write_run(tmp_path / "run")
    append(folder, step=10**400, **{"train/loss": 1.0})
    append(folder, step=4, **{"train/loss": 10**400, "rollout/raw_reward": True})
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("[" * 100_000 + "\n")
    for step in ([1], {"a": 1}, 10**400, "2", None):
        with open(folder / "incidents.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "check": "digest", "tensors": 3}) + "\n")
    for name in ("plan.json", "versions.json"):
        (folder / name).write_text("[" * 100_000)
    run = read_run(folder)
    assert run.last_step < 10**6 and not any(abs(v) > 2**53 for v in run.series("train/loss")[1])
    assert [i["step"] for i in run.incidents[-5:]] == [None] * 5
    said = " ".join(run.missing)
    assert "without a step" in said and "are no objects" in said and "plan.json is not JSON" in said
    assert facts(run) and rows(run) and charts([run]) and "digest" in shown(folder)
