"""Tasks: the same problems for the same seed, held-out ones that nobody trains on, a tokenizer that loses nothing."""

from __future__ import annotations

import sys

import pytest

from onegrid.errors import ConfigError, TaskError
from onegrid.rl.characters import CharacterTokenizer
from onegrid.rl.problems import TaskConfig, make_task
from onegrid.rl.reasoning import ReasoningGymTask
from onegrid.rl.tasks import ArithmeticTask, is_held_out


class Words:
    """A tokenizer that gives every character its code point."""

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def arithmetic(*, num_prompts=32, seed=0, **settings):
    return ArithmeticTask(CharacterTokenizer(), num_prompts=num_prompts, seed=seed, **settings)


def chain_sum(*, seed=0, num_prompts=6, **settings):
    settings = {"max_terms": 3, "max_digits": 2, **settings}
    return ReasoningGymTask("chain_sum", Words(), num_prompts=num_prompts, seed=seed, settings=settings)


TASKS = {"arithmetic": arithmetic, "reasoning_gym": chain_sum}


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_seed_step_and_attempt_decide_the_problems(make):
    assert make().prompts(3) == make().prompts(3)
    texts = [
        [p.text for p in task.prompts(*where)]
        for task, *where in [(make(), 3), (make(), 4), (make(), 3, 1), (make(seed=1), 3)]
    ]
    assert len({tuple(t) for t in texts}) == 4


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_no_two_prompts_of_a_run_share_an_index(make):
    task = make(num_prompts=6)
    indices = [p.prompt_index for step in range(4) for attempt in range(3) for p in task.prompts(step, attempt)]
    assert len(set(indices)) == len(indices)
    assert [p.prompt_index for step in (0, 1) for p in task.prompts(step)] == list(range(12))


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_no_training_problem_is_held_out_whatever_the_seed(make):
    held_out = {p.text for p in make().held_out(100)}
    assert len(held_out) == 100
    assert held_out == {p.text for p in make(seed=5).held_out(100)}
    trained = {p.text for seed in (0, 1) for step in range(10) for p in make(seed=seed).prompts(step)}
    assert not held_out & trained


@pytest.mark.parametrize("make", TASKS.values(), ids=TASKS)
def test_a_shorter_held_out_set_is_the_beginning_of_a_longer_one(make):
    task = make()
    assert [p.text for p in task.held_out(20)] == [p.text for p in task.held_out(40)][:20]
    assert task.held_out(0) == []


def test_two_digit_addition_has_a_thousand_held_out_problems_and_their_answers_are_right():
    task = arithmetic()
    prompts = task.held_out(1000)
    assert len({p.text for p in prompts}) == 1000 and all(is_held_out(p.text) for p in prompts)
    for prompt in prompts + task.prompts(0):
        a, b = prompt.text.removesuffix("=").split("+")
        assert 10 <= int(a) <= 99 and 10 <= int(b) <= 99
        assert prompt.answer == str(int(a) + int(b))
    first = [int(p.text[:2]) for p in prompts[:200]]
    assert min(first) < 20 and max(first) > 89  # not one corner of the table


def test_operations_and_digits_can_be_chosen():
    task = arithmetic(num_prompts=200, digits=1, operations=("-", "*"))
    assert task.num_problems == 200
    for prompt in task.prompts(0):
        a, operation, b, _ = prompt.text
        assert operation in "-*"
        assert int(prompt.answer) == (int(a) - int(b) if operation == "-" else int(a) * int(b))
    assert {p.text[1] for p in task.prompts(0)} == {"-", "*"}
    assert all(len(p.text) == 8 for p in arithmetic(digits=3).prompts(0))


def test_the_reward_of_arithmetic_is_exact():
    task = arithmetic()
    prompt = task.prompts(0)[0]
    assert task.score(prompt, prompt.answer) == 1.0
    assert task.score(prompt, prompt.answer + "0") == 0.0


def test_prompts_start_with_the_begin_id_where_there_is_one():
    tokenizer = CharacterTokenizer()
    with_bos = ArithmeticTask(tokenizer, num_prompts=1, seed=0, bos_token_id=1).prompts(0)[0]
    without = arithmetic(num_prompts=1).prompts(0)[0]
    assert with_bos.tokens == (1, *without.tokens)
    assert tokenizer.decode(with_bos.tokens) == with_bos.text


def test_more_held_out_problems_than_there_are_is_an_error_with_the_number():
    with pytest.raises(TaskError, match=r"500 held-out problems .* only \d+ of the 100 "):
        arithmetic(digits=1).held_out(500)


@pytest.mark.parametrize("wrong", [{"digits": 0}, {"operations": ()}, {"operations": ("/",)}, {"num_prompts": 0}])
def test_arithmetic_that_cannot_be_is_a_configuration_error(wrong):
    with pytest.raises(ConfigError):
        arithmetic(**wrong)


def test_partial_credit_of_the_library_is_cut_at_the_threshold():
    settings = {"max_terms": 2, "max_digits": 1}
    strict = ReasoningGymTask("chain_sum", Words(), num_prompts=1, seed=0, settings=settings)
    lenient = ReasoningGymTask("chain_sum", Words(), num_prompts=1, seed=0, settings=settings, threshold=0.2)
    prompt = strict.prompts(0)[0]
    wordy = f"it is {prompt.answer}"  # the library gives this the share of the answer in the text, below 1
    assert strict.score(prompt, f" {prompt.answer}\n") == 1.0
    assert (strict.score(prompt, wordy), strict.score(prompt, "no")) == (0.0, 0.0)
    assert lenient.score(prompt, prompt.answer + "00") == 1.0


@pytest.mark.parametrize(
    "generator", ["basic_arithmetic", "spell_backward", "leg_counting", "gsm_symbolic", "list_functions"]
)
def test_other_generators_work_by_name(generator):
    task = ReasoningGymTask(generator, Words(), num_prompts=3, seed=1, settings={})
    prompts = task.prompts(0)
    assert len(prompts) == 3
    assert all(task.score(p, p.answer) == 1.0 for p in prompts)


def test_the_template_surrounds_the_question():
    task = ReasoningGymTask("chain_sum", Words(), num_prompts=1, seed=0, settings={}, template="Q: {question} A:")
    text = task.prompts(0)[0].text
    assert text.startswith("Q: ") and text.endswith(" A:")


def test_a_task_that_yields_no_problem_fails(monkeypatch):
    monkeypatch.setattr("onegrid.rl.reasoning.is_held_out", lambda problem: True)
    with pytest.raises(TaskError, match="gave 0 training problems"):
        chain_sum().prompts(0)
    monkeypatch.setattr("onegrid.rl.reasoning.is_held_out", lambda problem: False)
    with pytest.raises(TaskError, match="0 different held-out problems of 5"):
        chain_sum().held_out(5)


def test_a_tokenizer_that_gives_no_tokens_fails():
    class Silent(Words):
        def encode(self, text):
            return []

    with pytest.raises(TaskError, match="no tokens"):
        ArithmeticTask(Silent(), num_prompts=1, seed=0).prompts(0)


@pytest.mark.parametrize(
    ("generator", "options", "message"),
    [
        ("chain_sums", {}, "did you mean chain_sum"),
        ("chain_sum", {"settings": {"min_terms": 0}}, "min_terms"),
        ("chain_sum", {"settings": {"terms": 3}}, "terms"),
        ("chain_sum", {"settings": {"seed": 3}}, "seed"),
        ("chain_sum", {"threshold": 0.0}, "threshold"),
        ("chain_sum", {"template": "solve"}, "template"),
    ],
)
def test_wrong_names_and_settings_of_the_library_are_configuration_errors(generator, options, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGymTask(generator, Words(), num_prompts=1, seed=0, **{"settings": {}, **options})


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=r"onegrid\[tasks\]"):
        chain_sum()


def test_a_task_is_chosen_by_configuration():
    config = TaskConfig(digits=1, operations=("*",))
    task = make_task(config, CharacterTokenizer(), num_prompts=4, seed=0)
    assert len(task.prompts(0)) == 4 and all("*" in p.text for p in task.prompts(0))
    config = TaskConfig(name="reasoning_gym", generator="chain_sum", bos_token_id=3)
    assert [p.tokens[0] for p in make_task(config, Words(), num_prompts=2, seed=0).prompts(0)] == [3, 3]


def test_every_character_comes_back():
    tokenizer = CharacterTokenizer()
    ids = list(range(3, tokenizer.vocab_size))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.decode([tokenizer.bos_token_id, *tokenizer.encode("12+3="), tokenizer.eos_token_id]) == "12+3="
    assert tokenizer.decode([tokenizer.vocab_size]) == "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(TaskError, match="'x'"):
        tokenizer.encode("1x")


def test_a_tokenizer_is_saved_and_loaded(tmp_path):
    path = tmp_path / "tokenizer.json"
    CharacterTokenizer("ab").save(path)
    assert CharacterTokenizer.load(path).encode("ba") == [4, 3]
    path.write_text("{}")
    with pytest.raises(TaskError, match="no character tokenizer"):
        CharacterTokenizer.load(path)
    path.write_text("{")
    with pytest.raises(TaskError, match="cannot read"):
        CharacterTokenizer.load(path)
    for characters in ("", "aa"):
        with pytest.raises(TaskError):
            CharacterTokenizer(characters)
