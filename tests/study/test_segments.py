"""A long campaign goes on where it was stopped, and adds up to what it would have been."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest

from onegrid.errors import ConfigError
from onegrid.study import segments
from onegrid.study.campaign import Outcome
from onegrid.study.corruptions import Tally
from onegrid.study.kills import Kills


def tally(num, seed):
    """As if every second one had been caught."""
    return Tally(num=num, seed=seed, alarms=num // 2, by_check=Counter(digest=num // 2), rows=[{"fault": f"r{seed}"}])


def test_pieces_are_made_once_and_added_up(tmp_path):
    made = []

    def run(num, seed):
        made.append((num, seed))
        if len(made) == 3:
            raise KeyboardInterrupt
        return tally(num, seed)

    def whole():
        return segments.in_segments(run, 120, 7, tmp_path, "healthy", lambda done: None)

    with suppress(KeyboardInterrupt):
        whole()
    assert len(list(tmp_path.glob("*.json"))) == 2 and not list(tmp_path.glob("*.tmp"))
    total = whole()
    assert [num for num, _ in made] == [50, 50, 20, 20] and len({seed for _, seed in made}) == 3
    assert (total.num, total.alarms, total.by_check, len(total.rows)) == (120, 60, Counter(digest=60), 3)
    assert whole() == total and len(made) == 4


def test_outcomes_and_kills_come_back_as_they_were(tmp_path):
    from onegrid.guard.verdict import failed

    verdict = failed("digest", "C2", expected="a", found="b", tensors=["t"], where=["row 0"])
    outcome = Outcome(
        fault="permuted", condition="C2", caught_by="digest", at="sync 2", named_right=True, seconds=0.1,
        fires=("digest",), verdicts=(verdict,), changed=1,
    )  # fmt: skip
    for _ in range(2):
        assert segments.kept(tmp_path, "one", lambda: outcome, segments.read_outcome) == outcome
        kills = segments.kills_in_segments(
            lambda num, seed: Kills(num=num, same=num, killed=1), 20, 0, tmp_path, lambda done: None
        )
        assert (kills.num, kills.same, kills.killed) == (20, 20, 2)


def test_pieces_that_other_code_made_are_not_added_to_those_of_this(tmp_path, monkeypatch):
    def ten(num, seed):
        return Kills(num=num, same=num, killed=1)

    segments.kills_in_segments(ten, 10, 0, tmp_path, lambda done: None)
    monkeypatch.setattr(segments, "code_digest", lambda: "other")
    with pytest.raises(ConfigError, match=r"kills_0_0_10\.json was made by other code than this; remove"):
        segments.kills_in_segments(ten, 10, 0, tmp_path, lambda done: None)
    (tmp_path / "kills_0_0_10.json").write_text('{"num": 10, "same": 10}')  # of a version that did not write it
    with pytest.raises(ConfigError, match="is no piece of a campaign"):
        segments.kills_in_segments(ten, 10, 0, tmp_path, lambda done: None)


def test_the_digest_of_the_code_is_that_of_its_files(tmp_path, monkeypatch):
    def digest():
        segments.code_digest.cache_clear()
        return segments.code_digest()

    monkeypatch.setattr(segments.onegrid, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "a.py").write_text("x = 1")
    first = digest()
    (tmp_path / "notes.txt").write_text("no code")
    assert digest() == first
    (tmp_path / "a.py").write_text("x = 2")
    (tmp_path / "ops").mkdir()
    second = digest()
    (tmp_path / "ops" / "k.cu").write_text("//")
    assert len({first, second, digest()}) == 3
    segments.code_digest.cache_clear()
