"""The supervised start is plain cross-entropy on answers, with the learner that reinforcement uses."""

from __future__ import annotations

import pytest
import torch

from onegrid.config import load_config
from onegrid.errors import EmptyBatchError
from onegrid.rl.supervised import answered, supervised_step
from onegrid.study.parts import build, design
from onegrid.types import Batch
from tests.rl.tiny import write_tiny_run


@pytest.fixture
def parts(tmp_path):
    """Task, tokenizer and learner of a tiny run."""
    return build(design(load_config(write_tiny_run(tmp_path)), tmp_path))


def test_a_sequence_is_the_problem_the_answer_and_the_end(parts):
    prompt = parts.task.prompts(1)[0]
    (sequence,) = answered([prompt], parts.tokenizer, end_token_id=2)
    assert parts.tokenizer.decode(sequence.tokens_T.tolist()) == prompt.text + prompt.answer
    assert sequence.tokens_T[sequence.num_prompt :].tolist() == [*parts.tokenizer.encode(prompt.answer), 2]
    assert sequence.mask_R.all() and len(sequence.mask_R) == len(sequence.tokens_T) - sequence.num_prompt


def test_the_loss_is_the_mean_negative_log_probability_of_the_answers_and_falls(parts):
    sequences = answered(parts.task.prompts(1), parts.tokenizer, end_token_id=2)
    logp = torch.cat(parts.learner.log_probs(Batch(sequences=tuple(sequences)))).double()
    losses = [supervised_step(parts.learner, sequences)["train/loss"] for _ in range(10)]
    # the loss sums a few dozen FP32 products of weight and log-probability, each rounded once
    assert losses[0] == pytest.approx(-logp.mean().item(), rel=1e-5)
    assert losses[-1] < losses[0]


def test_a_step_without_a_sequence_is_an_error(parts):
    with pytest.raises(EmptyBatchError):
        supervised_step(parts.learner, [])
