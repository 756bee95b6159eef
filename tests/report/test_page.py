"""The page in a real browser: it renders without an error or a request, and its numbers are those of the record."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import onegrid.report
from onegrid.errors import CheckpointError
from onegrid.report.page import write_report
from onegrid.rl.record import read_metrics
from tests.report.browser import Tab, browser, find_browser
from tests.report.runs import TOKENS, add_incident, write_run

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked=2'>\u2028{{7*7}}'\"&lt;"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    """One browser for all tests of this file."""
    executable = find_browser()
    if executable is None:
        pytest.skip("needs a Chromium browser: apt-get install chromium")
    with browser(executable, tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """One address for all pages: a browser compiles the plotting library again, for seconds, at every other one."""
    return tmp_path_factory.mktemp("page") / "page.html"


@pytest.fixture
def page(place):
    """Where a test writes its page; nothing of another test is there."""
    place.unlink(missing_ok=True)
    return place


def load(tab: Tab, page: Path, *, width: int = 1280, dark: bool = False) -> None:
    """Opens a page afresh and checks what must hold for each: drawn, no error, nothing asked of a network."""
    tab.errors.clear()
    tab.requests.clear()
    tab.open(page.as_uri(), width=width, dark=dark)
    assert tab.value("document.documentElement.dataset.drawn") == "yes"
    assert tab.errors == []
    assert [url for url in tab.requests if not url.startswith(("data:", "blob:"))] == [page.as_uri()]
    assert tab.value("window.hacked === undefined")


def page_of(folders: list[Path], page: Path) -> list[str]:
    """Writes the report and returns what it says is missing."""
    missing = write_report(folders, page)
    assert page.stat().st_size < 10e6
    return missing


def facts(tab: Tab) -> dict[str, list[float]]:
    """The exact numbers behind the headline, by label."""
    found = tab.value(
        "Object.fromEntries([...document.querySelectorAll('[data-fact]')].map(e => [e.dataset.fact, e.dataset.exact]))"
    )
    return {label: [float(x) for x in text.split()] for label, text in found.items()}


def drawn(tab: Tab, chart: str) -> dict[str, list[list[float]]]:
    """What the plotting library holds for a chart: steps and values by metric."""
    return tab.value(
        f"Object.fromEntries(document.getElementById('chart-{chart}').data.map(t => [t.meta, [[...t.x], [...t.y]]]))"
    )


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False)], ids=["narrow and dark", "wide and light"])
def test_the_numbers_on_the_page_are_those_of_the_record(tab, page, tmp_path, width, dark):
    folder = write_run(tmp_path / "run-1")
    assert page_of([folder], page) == []
    load(tab, page, width=width, dark=dark)
    lines = read_metrics(folder)
    steps = lines[1:]

    headline = facts(tab)
    assert headline["Reward"] == [steps[0]["rollout/raw_reward"], steps[-1]["rollout/raw_reward"]]
    assert headline["Held-out accuracy"] == [0.25, 0.75]
    assert headline["Mismatch"] == [0.0]
    assert headline["Checks"] == [96, 96]
    assert headline["Time"] == [sum(line["perf/step_seconds"] for line in steps)]
    text = tab.value("document.querySelector('.tile.lead').innerText")
    assert f"{12 * TOKENS:,} log-probs compared as bytes, all equal" in text

    charts = {
        "reward": ["rollout/raw_reward", "eval/held_out/accuracy"],
        "length": ["rollout/response_length", "rollout/response_length_min", "rollout/response_length_max"],
        "mismatch": ["mismatch/max_abs", "mismatch/p99", "mismatch/kl"],
        "entropy": ["train/entropy"],
        "gradient": ["train/grad_norm"],
        "stages-0": ["perf/rollout_seconds", "perf/update_seconds"],
    }
    for chart, keys in charts.items():
        found = drawn(tab, chart)
        for key in keys:
            known = [(line["step"], line[key]) for line in lines if key in line]
            assert found[key] == [[step for step, _ in known], [value for _, value in known]], key
    heat = tab.value("(({y, customdata}) => [y, customdata])(document.getElementById('chart-layers-0').data[0])")
    assert heat[0] == ["embed_tokens", "layers.0", "layers.1"]
    assert heat[1] == [[line[f"train/grad_norm/{name}"] for line in steps] for name in heat[0]]

    table = tab.value(
        "[...document.querySelectorAll('.metrics tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert [row[0] for row in table] == sorted({key for line in lines for key in line} - {"step"})
    for key, *cells in table:
        values = [line[key] for line in lines if key in line]
        assert [float(cell) for cell in cells] == [values[0], values[-1], min(values), max(values)]

    assert tab.value("document.documentElement.scrollWidth <= innerWidth"), "nothing makes the page scroll sideways"
    assert tab.value("document.querySelectorAll('.strip .light.passed').length") == 96
    assert tab.value("document.querySelectorAll('.network td.f-mxfp8').length") == 2 * 7


def test_several_runs_lie_over_each_other_with_a_legend(tab, page, tmp_path):
    one = write_run(tmp_path / "mxfp8-1")
    other = write_run(tmp_path / "bf16-1", recipe="bf16", seed=1, num_steps=20)
    page_of([one, other], page)
    load(tab, page, width=2000)
    names = tab.value("document.getElementById('chart-entropy').data.map(t => t.name)")
    assert names == ["mxfp8-1", "bf16-1"]
    legend = tab.value("[...document.querySelectorAll('#chart-entropy .legendtext')].map(e => e.textContent)")
    assert legend == names
    lengths = tab.value("document.getElementById('chart-entropy').data.map(t => t.y.length)")
    assert lengths == [12, 20]
    differing = tab.value("document.querySelector('#configuration').parentElement.querySelector('table').innerText")
    assert "recipe.preset" in differing and "loop.num_steps" in differing and "device" not in differing
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")


def test_hostile_text_is_shown_and_never_run(tab, page, tmp_path):
    folder = write_run(tmp_path / "<b onclick=x>&run", num_steps=4, texts=(HOSTILE, HOSTILE))
    add_incident(folder, step=2, text=HOSTILE)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, f"guard/{HOSTILE}": 0, f"train/grad_norm/{HOSTILE}": 1.5}) + "\n")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config + "[task]\ntemplate = " + json.dumps(HOSTILE) + "\n")
    page_of([folder], page)
    load(tab, page)
    assert tab.value("document.querySelector('.prompt').textContent") == HOSTILE
    assert HOSTILE in tab.value("document.querySelector('.incident').textContent")
    assert tab.value("document.querySelectorAll('main img').length") == 0
    assert "<b onclick=x>&run" in tab.value("document.querySelector('h1').textContent")
    policy = tab.value("document.querySelector('meta[http-equiv]').content")
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]


def test_a_script_that_gets_into_the_page_does_not_run(tab, page, tmp_path):
    folder = write_run(tmp_path / "run-1", num_steps=4)
    page_of([folder], page)
    page.write_text(page.read_text().replace("<main", "<script>window.hacked = 3</script><main"))
    tab.open(page.as_uri(), width=800)
    assert tab.value("window.hacked === undefined && document.documentElement.dataset.drawn === 'yes'")
    tab.errors.clear()


def test_a_keyboard_reaches_everything_and_the_theme_changes(tab, page, tmp_path):
    folder = write_run(tmp_path / "run-1", num_steps=4)
    page_of([folder], page)
    load(tab, page)
    seen = []
    for _ in range(40):
        tab.press("Tab", 9)
        seen.append(tab.value("document.activeElement.id || document.activeElement.textContent.trim().slice(0, 30)"))
        if seen[-1] == "theme":
            before = tab.value("getComputedStyle(document.body).backgroundColor")
            tab.press("Enter", 13)
            assert tab.value("getComputedStyle(document.body).backgroundColor") != before
    assert seen[0] == "Skip to the content"
    assert {"theme", "Checks", "config.toml"} <= set(seen)
    assert tab.errors == []


def test_a_run_in_progress_or_cut_short_says_what_is_missing(tab, page, tmp_path):
    folder = write_run(tmp_path / "run-1", done=5)
    add_incident(folder, step=6)
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics[:-40])
    for name in ("versions.json", "plan.json"):
        (folder / name).unlink()
    for path in (folder / "rollouts").iterdir():
        path.unlink()
    missing = " ".join(page_of([folder], page))
    for words in ("last line is torn", "versions.json cannot be read", "plan.json", "No rollouts were kept"):
        assert words in missing
    load(tab, page)
    shown = tab.value("document.body.innerText")
    assert "What is missing" in shown and "last line is torn" in shown
    assert "4 of 12" in shown and "stopped by a check" in shown
    assert "There is no plan to show." in shown and "No rollouts to show." in shown
    assert tab.value("document.querySelectorAll('.light.failed[title]').length") == 1
    assert tab.value("document.querySelector('.tile.bad [data-fact]').dataset.fact") == "Checks"


def test_what_was_not_measured_is_said_and_no_zero_is_drawn(tab, page, tmp_path):
    def only_reward(step, metrics):
        for key in [key for key in metrics if key != "rollout/raw_reward"]:
            del metrics[key]

    folder = write_run(tmp_path / "run-1", num_steps=4, change=only_reward)
    page_of([folder], page)
    load(tab, page)
    pair = "t => [t.children[0].innerText, t.children[1].innerText]"
    tiles = tab.value(f"Object.fromEntries([...document.querySelectorAll('.tile')].map({pair}))")
    for label in ("Mismatch", "Checks", "Sampler speed", "Time"):
        assert tiles[label].startswith("not measured"), label
    drawings = tab.value("[...document.querySelectorAll('.chart')].map(e => e.id)")
    assert drawings == ["chart-reward"]
    assert len(re.findall("not measured", tab.value("document.body.innerText"))) > 10


def luminance(color: str) -> float:
    """Relative luminance of "#rrggbb", as WCAG 2 defines it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_the_contrast_of_wcag_aa_in_light_and_dark():
    style = (Path(onegrid.report.__file__).parent / "page.css").read_text()
    themes = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block)) for block in style.split("color-scheme")[1:4]]
    assert len(themes) == 3 and themes[1] == themes[2] != themes[0]
    pairs = [(ink, page) for page in ("page", "card") for ink in ("ink", "muted", "accent", "good", "bad", "unsure")]
    pairs += [("good", "good-page"), ("bad", "bad-page"), ("unsure", "unsure-page"), ("muted", "good-page")]
    pairs += [("on-format", fmt) for fmt in ("bf16", "mxfp8", "mxfp4", "nvfp4", "fp8", "other")]
    pairs += [("on-level", f"l{level}") for level in range(1, 6)]
    for theme in themes:
        for one, other in pairs:
            high, low = sorted((luminance(theme[one]), luminance(theme[other])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (one, other, theme[one], theme[other])
        for curve in range(8):  # 3 is what WCAG asks of graphics
            high, low = sorted((luminance(theme[f"c{curve}"]), luminance(theme["card"])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 3


def damage(folder: Path, content: bytes) -> None:
    """Other bytes in every file of a run."""
    for name in ("metrics.jsonl", "incidents.jsonl", "config.toml", "plan.json", "versions.json", "trackers.json"):
        (folder / name).write_bytes(content)
    for path in (folder / "rollouts").iterdir():
        path.write_bytes(content)


BAD = [b"", b"\xff\xfe\n", b"[1, 2]\n{}\n", b'{"step": "x"}\n{"step": 1, "train/loss": NaN, "guard/x": "y"}\n']


@pytest.mark.parametrize("content", BAD)
def test_damaged_files_still_give_a_page(tmp_path, content):
    folder = write_run(tmp_path / "run-1", num_steps=4)
    damage(folder, content)
    assert page_of([folder], tmp_path / "page.html")


def test_the_page_of_damaged_files_renders(tab, page, tmp_path):
    folder = write_run(tmp_path / "run-1", num_steps=4)
    damage(folder, BAD[-1])
    page_of([folder], page)
    load(tab, page)
    assert "What is missing" in tab.value("document.body.innerText")


def test_what_is_no_run_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"neither config\.toml nor"):
            write_report([folder], tmp_path / "page.html")
    folder = write_run(tmp_path / "run-1", num_steps=4)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_report([folder], tmp_path / "file" / "page.html")
    assert not (tmp_path / "page.html").exists()
