"""The configuration is read strictly and written back without loss."""

from __future__ import annotations

import pytest

from onegrid.config import load_config, reference, to_toml
from onegrid.errors import ConfigError

TEXT = """
seed = 7
[model]
checkpoint = "start"
[sampling]
temperature = 1
stop_strings = ["\\n", "quote\\" and \\u00e9"]
"""


@pytest.fixture
def path(tmp_path):
    """A small configuration file."""
    path = tmp_path / "run.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_an_integer_may_stand_for_a_number_and_nothing_else_is_converted(path):
    config = load_config(path)
    assert (config.seed, config.sampling.temperature) == (7, 1.0)
    assert isinstance(config.sampling.temperature, float)
    with pytest.raises(ConfigError, match=r"seed must be integer, got True"):
        load_config(path, ["seed=true"])
    with pytest.raises(ConfigError, match=r"sampling\.temperature must be number, got 'hot'"):
        load_config(path, ["sampling.temperature=hot"])


def test_what_is_written_reads_back_identical(path):
    config = load_config(path, ["sampling.temperature=0.1", "sampling.top_p=0.30000000000000004"])
    again = path.with_name("again.toml")
    again.write_text(to_toml(config), encoding="utf-8")
    assert load_config(again) == config
    assert to_toml(load_config(again)) == to_toml(config)


def test_overrides_win_in_order_and_text_needs_no_quotes(path):
    config = load_config(path, ["seed=1", "seed=2", "model.checkpoint=a=b/c d", 'sampling.stop_strings=["x"]'])
    assert config.seed == 2
    assert config.model.checkpoint == "a=b/c d"
    assert config.sampling.stop_strings == ("x",)


def test_a_table_may_be_given_as_one_override(path):
    settings = "task.settings={min_terms = 2, max_terms = 3}"
    task = load_config(path, ["task.name=reasoning_gym", "task.generator=chain_sum", settings]).task
    assert task.settings == {"min_terms": 2, "max_terms": 3}


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("sampling.temprature=1", "'sampling.temperature'"),
        ("temperature=1", "'sampling.temperature'"),
        ("checkpoint.evry=1", "'checkpoint.every'"),
        ("sampling.every=1", "every'"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_by_its_full_name(path, override, suggestion):
    with pytest.raises(ConfigError, match=f"unknown key .*did you mean .*{suggestion}"):
        load_config(path, [override])


def test_an_unknown_key_in_the_file_suggests_the_nearest_too(path):
    path.write_text(TEXT + "top_pp = 0.5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown key 'sampling\.top_pp'; did you mean 'sampling\.top_p'\?"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "not KEY=VALUE"),
        ("=3", "not KEY=VALUE"),
        ("model=3", "'model' is a section; override one of its keys: checkpoint"),
        ("seed.x=1", "seed must be a section, got 7"),
        ("checkpoint.keep=0", r"\[checkpoint\].*keep 0 must be at least 1|\[checkpoint\].*keep 0 at least 1"),
    ],
)
def test_an_override_that_cannot_be_used_says_why(path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(path, [override])


def test_a_mark_of_byte_order_at_the_start_changes_nothing(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + b'model.checkpoint = "model"\r\nseed = 4\r\n')
    assert load_config(tmp_path / "run.toml").seed == 4


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_config(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "bad.toml").write_text("seed = = 3")
    with pytest.raises(ConfigError, match=r"not TOML.*line 1"):
        load_config(tmp_path / "bad.toml")


def test_a_missing_key_without_default_is_named(tmp_path):
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match=r"model\.checkpoint is missing"):
        load_config(tmp_path / "empty.toml")


def test_every_key_has_a_row_in_the_reference():
    rows = {row.key: row for row in reference()}
    assert rows["seed"].default == "0"
    assert rows["model.checkpoint"].default == ""
    assert all(row.type for row in rows.values())


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling.temperature=nan", "sampling: temperature is nan; allowed: 0, or 1e-6 to 1e6"),
        ("learner.max_grad_norm=nan", "max_grad_norm nan"),
        ("learner.weight_decay=nan", "weight_decay nan must be finite"),
        ("learner.eps=inf", "eps inf above 0 and finite"),
        ("sampling.top_p=2", "sampling: top_p is 2.0; allowed: above 0, up to 1"),
        ("sampling.top_k=-1", "sampling: top_k is -1"),
        ("sampling.max_new_tokens=0", "sampling: max_new_tokens is 0"),
        ("sampling.max_new_tokens=1024", "no room for a prompt in the 1024 positions of a slot"),
        ('sampling.stop_strings=[""]', "allowed: no empty string"),
        ("sampler.max_len=8", "the probe of every synchronization takes 12"),
    ],
)
def test_what_no_step_could_sample_is_refused_before_a_run_begins(path, override, said):
    with pytest.raises(ConfigError, match=said):
        load_config(path, ["sampling.max_new_tokens=4", override])
