"""Files as they are published, files as they should not be, and an order that nothing can shift."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

from onegrid.config import load_config, to_toml
from onegrid.errors import ConfigError, TaskError
from onegrid.rl.characters import CharacterTokenizer
from onegrid.rl.dataset import DatasetTask, Order
from onegrid.rl.examples import DataConfig
from onegrid.rl.problems import TaskConfig, at_folder, make_task
from onegrid.rl.scoring import ScoringConfig
from tests.rl.data_files import DAPO_SCHEMA, dapo_rows, gsm8k_rows, write_jsonl, write_parquet

HERE = ScoringConfig(workers=0)


def task_of(*files, num_prompts=2, seed=0, **settings):
    return DatasetTask(
        DataConfig(files=files, **settings), CharacterTokenizer(), num_prompts=num_prompts, seed=seed, scoring=HERE
    )


def texts_of(task, steps):
    return [p.text for step in steps for p in task.prompts(step)]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_gsm8k_as_published_loads_with_two_lines(tmp_path, write):
    name = write(tmp_path / f"train.{write.__name__.removeprefix('write_')}", gsm8k_rows(40))
    config = TaskConfig(name="dataset", data=DataConfig(files=(name,)))  # the two lines
    task = make_task(config, CharacterTokenizer(), num_prompts=3, seed=0)
    prompts = task.prompts(1)
    a, b = prompts[0].text.rstrip("=").split("+")
    assert task.score(prompts[0], f"it is\n#### {int(a) + int(b)}") == 1.0
    assert task.score(prompts[0], rf"\boxed{{{int(a) + int(b) + 1}}}") == 0.0
    assert prompts[0].tokens == tuple(CharacterTokenizer().encode(prompts[0].text))
    assert task.counts["trained"] + task.counts["held_out"] == 40
    trained = set(texts_of(task, range(1, 20)))
    assert not trained & {p.text for p in task.held_out(task.counts["held_out"])}


def test_dapo_math_17k_as_published_loads_with_two_lines_and_without_its_repeats(tmp_path):
    rows = dapo_rows(30)
    name = write_parquet(tmp_path / "dapo-math-17k.parquet", rows + rows + rows, DAPO_SCHEMA, row_group_size=7)
    task = task_of(name, num_prompts=4)
    assert task.counts["duplicate"] == 60
    prompt = task.prompts(1)[0]
    assert prompt.data_source == "math_dapo" and prompt.entry["extra_info"]["index"].startswith("id-")
    assert task.score(prompt, f"Answer: {prompt.answer}") == 1.0
    with pytest.raises(TaskError, match=r"row 31: the id 'id-0' came before"):
        task_of(name, on_duplicate="fail")


def test_keys_can_be_named_and_metadata_come_along(tmp_path):
    rows = [{"q": {"text": f"{i}="}, "gold": i, "meta": {"level": i, "index": i}} for i in range(9)]
    keys = {"input_key": "q.text", "label_key": "gold", "metadata_key": "meta"}
    task = task_of(write_jsonl(tmp_path / "a.jsonl", rows), **keys)
    prompt = task.prompts(1)[0]
    assert prompt.entry["extra_info"]["level"] == prompt.entry["label"]
    assert task.score(prompt, prompt.answer) == 1.0


def test_held_out_files_are_never_trained_on(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", gsm8k_rows(12))
    held = write_jsonl(tmp_path / "test.jsonl", gsm8k_rows(4))
    task = task_of(train, eval_files=(held,))
    assert [p.text for p in task.held_out(4)] == ["0+1=", "1+2=", "2+3=", "3+4="]
    assert task.counts["also in eval_files"] == 4 and task.counts["trained"] == 8
    with pytest.raises(TaskError, match="5 held-out problems were asked for, the files have 4"):
        task.held_out(5)


@pytest.mark.parametrize("num_rows, num_prompts, epochs", [(4, 2, 2), (5, 2, 4), (3, 3, 3), (7, 5, 5)])
def test_case_P1_any_cut_and_any_second_cut_see_what_an_uninterrupted_run_sees(num_rows, num_prompts, epochs):
    last = num_rows * epochs // num_prompts
    whole = Order(num_rows, seed=1, num_prompts=num_prompts)
    expected = {step: whole.rows(step) for step in range(1, last + 1)}
    for first in range(last + 1):
        for second in range(first, last + 1):
            runs = [Order(num_rows, seed=1, num_prompts=num_prompts) for _ in range(3)]
            steps = [range(1, first + 1), range(first + 1, second + 1), range(second + 1, last + 1)]
            seen = {step: run.rows(step) for run, part in zip(runs, steps, strict=True) for step in part}
            assert seen == expected
    in_order = [row for step in expected for row in expected[step]]
    for epoch in range(len(in_order) // num_rows):
        assert sorted(in_order[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_case_P1_prompts_resume_from_seed_and_step_alone(tmp_path):
    name = write_jsonl(tmp_path / "a.jsonl", gsm8k_rows(11))
    whole = [task_of(name, seed=5).prompts(step) for step in range(1, 9)]
    later = task_of(name, seed=5)
    assert [later.prompts(step) for step in (8, 3, 5)] == [whole[7], whole[2], whole[4]]
    assert task_of(name, seed=6).prompts(1) != whole[0]
    assert len({p.prompt_index for prompts in whole for p in prompts}) == 16
    with pytest.raises(TaskError, match="the first step is 1"):
        later.prompts(0)


def test_the_shuffle_is_the_same_on_every_machine():
    assert Order(10, seed=0, num_prompts=10).rows(1) == [
        8,
        4,
        7,
        2,
        6,
        0,
        9,
        3,
        1,
        5,
    ]  # of PCG64, whose stream numpy keeps


def test_a_redraw_takes_other_prompts():
    order = Order(20, seed=0, num_prompts=4)
    assert not set(order.rows(3)) & set(order.rows(3, 1))
    assert order.rows(3, 1) == Order(20, seed=0, num_prompts=4).rows(3, 1)


GOOD = {"question": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (b'{"question": "\xff\xfe", "answer": "2"}', "bad_utf8", "row 2 is not UTF-8"),
        (b'{"question": "\\ud800", "answer": "2"}', "bad_utf8", "row 2 is not UTF-8"),
        (b'{"question": "1', "not_json", "row 2 is not JSON"),
        (b"[1, 2]", "not_json", "row 2 is a list, not an object"),
        (b"[" * 100_000, "not_json", "row 2 is not JSON"),
        (b'{"question": "' + b"1" * 10_000_000 + b'", "answer": "2"}', "too_big", r"row 2 has 100000\d\d bytes"),
        ({"question": "", "answer": "2"}, "no_tokens", "row 2: the prompt '' has no tokens"),
        (
            {"question": "1+2=", "answer": 3},
            "label_type",
            "row 2: answer is 3, a number, where the first label was a text",
        ),
        ({"question": "1+2=", "answer": None}, "no_label", "row 2: answer is empty"),
        ({"question": "1+2=", "answer": ""}, "no_label", "row 2: answer is empty"),
        ({"question": "1+2=", "answer": " \n"}, "no_label", "row 2: answer is empty"),
        (
            b'{"question": "1+2=", "answer": "3"},',
            "not_json",
            "row 2 is not JSON: .*each line must be one whole object",
        ),
        (b'{"question": "1+2=", "answer": ' + b"9" * 5000 + b"}", "not_json", "row 2 is not JSON: Exceeds the limit"),
        ({"question": "1+2=", "answer": float("nan")}, "no_label", "row 2: answer is nan"),
        (b'{"question": "1+2=", "answer": 1e999}', "no_label", "row 2: answer is inf"),
        ({"question": "1+2=", "reply": "3"}, "no_column", "row 2 has no 'answer'"),
        ({"question": 12, "answer": "3"}, "bad_prompt", "row 2: question is 12, not text or a chat"),
        ({"question": [], "answer": "3"}, "bad_prompt", r"row 2: question is \[\]"),
        ({"question": [{"role": "user", "content": ["x"]}], "answer": "3"}, "bad_prompt", "row 2: question has"),
        ({"question": [{"role": "bot", "content": "1"}], "answer": "3"}, "bad_prompt", "role 'bot'"),
        ({"question": "1@2", "answer": "3"}, "no_tokens", "row 2.*knows only"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path, bad, kind, message):
    rows = [GOOD, bad, *gsm8k_rows(10)]
    name = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(TaskError, match=message) as error:
        task_of(name, max_prompt_tokens=64)
    assert name in str(error.value) and len(str(error.value)) < 1000
    task = task_of(name, max_prompt_tokens=64, on_bad_row="skip")
    assert task.counts[kind] == 1
    assert task.counts["trained"] + task.counts["held_out"] == 11


def test_a_mark_of_byte_order_and_windows_line_ends_change_nothing(tmp_path):
    rows = [json.dumps(row).encode() for row in gsm8k_rows(12)]
    plain, other = tmp_path / "plain.jsonl", tmp_path / "other.jsonl"
    plain.write_bytes(b"\n".join(rows))
    other.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(rows) + b"\r\n\r\n")
    assert texts_of(task_of(str(plain)), (1, 2)) == texts_of(task_of(str(other)), (1, 2))


def test_a_label_of_a_hundred_digits_keeps_every_one(tmp_path):
    rows = [{"question": f"{i}+1=", "answer": 10**100 + i} for i in range(12)]
    task = task_of(write_jsonl(tmp_path / "a.jsonl", rows))
    prompt = task.prompts(1)[0]
    label = 10**100 + int(prompt.text.partition("+")[0])
    assert prompt.answer == str(label)
    assert [task.score(prompt, rf"\boxed{{{x}}}") for x in (label, label + 1)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"reward_model": None}, "no_label", r"row 3: reward_model\.ground_truth is empty"),
        ({"reward_model": {"ground_truth": None, "style": "x"}}, "no_label", "row 3: .* is empty"),
        ({"prompt": None}, "bad_prompt", "row 3: prompt is None"),
        ({"prompt": [None]}, "bad_prompt", "row 3: prompt has None"),
        ({"prompt": [{"content": None, "role": "user"}]}, "bad_prompt", "row 3: prompt has"),
        ({"prompt": [{"content": "1", "role": None}]}, "bad_prompt", "row 3: prompt has the role None"),
    ],
)
def test_nulls_inside_of_columns_are_named_or_counted(tmp_path, fields, kind, message):
    rows = dapo_rows(12)
    rows[2] |= fields
    name = write_parquet(tmp_path / "a.parquet", rows, DAPO_SCHEMA)
    with pytest.raises(TaskError, match=message):
        task_of(name)
    assert task_of(name, on_bad_row="skip").counts[kind] == 1


def test_null_metadata_and_a_null_source_are_no_fault(tmp_path):
    rows = dapo_rows(12)
    rows[2] |= {"extra_info": None, "data_source": None}
    rows[3] |= {"extra_info": {"index": None}}
    task = task_of(write_parquet(tmp_path / "mine.parquet", rows, DAPO_SCHEMA))
    assert task.counts["trained"] + task.counts["held_out"] == 12


def test_text_and_chats_may_stand_in_one_column(tmp_path):
    rows = [
        {
            "prompt": f"{i}+1=" if i % 2 else [{"role": "user", "content": f"{i}+1="}],
            "reward_model": {"ground_truth": i},
        }
        for i in range(12)
    ]
    task = task_of(write_jsonl(tmp_path / "a.jsonl", rows))
    assert all(re.fullmatch(r"\d+\+1=", text) for text in texts_of(task, (1, 2, 3)))


def test_a_flipped_bit_in_a_parquet_file_with_sums_is_named(tmp_path):
    rows = [{"question": f"{i}+1=", "answer": str(i)} for i in range(200)]
    name = write_parquet(tmp_path / "a.parquet", rows, write_page_checksum=True, compression="none")
    data = bytearray(Path(name).read_bytes())
    data[data.index(b"77+1=")] ^= 1  # 67+1=, which is a problem too
    Path(name).write_bytes(data)
    with pytest.raises(TaskError, match=r"a\.parquet"):
        task_of(name)


def test_an_id_given_twice_to_different_prompts_is_a_bad_row(tmp_path):
    rows = [{"prompt": f"{i}=", "reward_model": {"ground_truth": 1}, "extra_info": {"index": i // 2}} for i in range(6)]
    name = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(TaskError, match="row 2: the id 0 was given to another prompt before"):
        task_of(name)
    assert task_of(name, num_prompts=1, on_bad_row="skip").counts["duplicate_id"] == 3


def test_long_prompts_are_left_out_with_a_count_or_refused(tmp_path):
    name = write_jsonl(tmp_path / "a.jsonl", [*gsm8k_rows(10), {"question": "1" * 50, "answer": "1"}])
    assert task_of(name, max_prompt_tokens=8).counts["too_long"] == 1
    with pytest.raises(TaskError, match="row 11: the prompt has 50 tokens, max_prompt_tokens is 8"):
        task_of(name, max_prompt_tokens=8, on_long_prompt="fail")


def test_bad_utf8_inside_parquet_names_its_row(tmp_path):
    texts = pa.array([b"1=", b"2=", b"\xff", b"3=", b"4=", b"5="], pa.binary()).cast(pa.string(), safe=False)
    table = pa.table({"question": pa.Array.from_buffers(pa.string(), 6, texts.buffers()), "answer": ["1"] * 6})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    name = str(tmp_path / "a.parquet")
    with pytest.raises(TaskError, match=r"a\.parquet, row 3 is not UTF-8"):
        task_of(name)
    assert task_of(name, num_prompts=1, on_bad_row="skip").counts["bad_utf8"] == 1


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "a.jsonl", "is empty"),
        (b"\n\n", "a.jsonl", "is empty"),
        (b"", "a.parquet", "is no parquet file"),
        (b"PAR1 and then nothing", "a.parquet", "is no parquet file"),
        (b"{}", "a.csv", r"must end in \.parquet"),
        (gzip.compress(b"{}", mtime=0), "a.jsonl", "row 1 is not UTF-8.*gzip"),
        ("{}".encode("utf-16"), "a.jsonl", "row 1 is not UTF-8.*UTF-16"),
        (b'{"a": 1}\n', "a.jsonl", r"a\.jsonl, row 1 has no 'prompt'; it has a; set input_key"),
        (b'{"Prompt": "1"}\n', "a.jsonl", "did you mean 'Prompt'"),
    ],
)
def test_a_file_that_is_no_data_says_so(tmp_path, content, name, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=message):
        task_of(str(tmp_path / name))


def test_a_missing_or_empty_set_of_files_says_so(tmp_path):
    with pytest.raises(TaskError, match="cannot read"):
        task_of(str(tmp_path / "none.jsonl"))
    write_parquet(tmp_path / "empty.parquet", [], DAPO_SCHEMA)
    with pytest.raises(TaskError, match="is empty"):
        task_of(str(tmp_path / "empty.parquet"))
    with pytest.raises(ConfigError, match="files"):
        TaskConfig(name="dataset")
    name = write_jsonl(tmp_path / "bad.jsonl", [b"no", b"not"])
    with pytest.raises(TaskError, match=r"no row of .*bad\.jsonl is usable .2 not_json.*the first: .*row 1"):
        task_of(name, on_bad_row="skip")
    name = write_jsonl(tmp_path / "few.jsonl", gsm8k_rows(3))
    with pytest.raises(TaskError, match="a step takes 9 prompts"):
        task_of(name, num_prompts=9)


def test_the_configuration_of_files_and_rewards_survives_writing_and_names_are_absolute(tmp_path):
    text = """
    model.checkpoint = "model"
    [task]
    name = "dataset"
    data = { files = ["train.parquet"], layout = "gsm8k" }
    [[task.scoring.rewards]]
    answer_type = "integer"
    [[task.scoring.rewards]]
    function = "mine.py:f"
    weight = 0.5
    """
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml")
    assert [r.weight for r in config.task.scoring.rewards] == [1.0, 0.5]
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml") == config
    task = at_folder(config.task, tmp_path)
    assert task.data.files == (str(tmp_path / "train.parquet"),)
    assert task.scoring.rewards[1].function == f"{tmp_path / 'mine.py'}:f"
    (tmp_path / "run.toml").write_text(text.replace("weight", "wait"))
    with pytest.raises(ConfigError, match=r"task\.scoring\.rewards\[1\]\.wait"):
        load_config(tmp_path / "run.toml")


def test_the_tables_of_the_readme_are_read_as_they_stand(tmp_path):
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
    tables = re.findall(r"^```toml\n(.*?)^```", readme, re.M | re.S)
    assert len(tables) >= 2
    (tmp_path / "run.toml").write_text('model.checkpoint = "model"\n' + "\n".join(tables))
    config = load_config(tmp_path / "run.toml")
    assert config.task.data.files == ("train.parquet",)
    assert [r.style for r in config.task.scoring.rewards] == ["compute_score", "trl"]
