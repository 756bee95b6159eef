"""Algorithms by name, and KL in the reward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onegrid.config import load_config, to_toml
from onegrid.errors import ConfigError, NonFiniteError
from onegrid.rl.advantage import advantages_of
from onegrid.rl.algorithms import ALGORITHMS
from onegrid.rl.kl_reward import kl_in_reward
from tests.rl.rollouts import group


def config_of(tmp_path, text, *overrides):
    (tmp_path / "run.toml").write_text(f'{text}\n[model]\ncheckpoint = "model"\n')
    return load_config(tmp_path / "run.toml", overrides)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_sets_what_its_paper_says_and_survives_writing(tmp_path, name):
    config = config_of(tmp_path, f'algorithm = "{name}"')
    for section, settings in ALGORITHMS[name].items():
        for key, value in settings.items():
            assert getattr(getattr(config, section), key) == value, f"{section}.{key}"
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml") == config


def test_the_file_and_the_command_line_win_over_the_algorithm(tmp_path):
    config = config_of(tmp_path, 'algorithm = "dapo"\nloss.clip_high = 0.4', "dynamic.max_rounds=3", "algorithm=cispo")
    assert (config.loss.policy, config.loss.clip_high, config.dynamic.max_rounds) == ("cispo", 0.4, 3)


def test_the_divisor_of_dr_grpo_is_the_cap_on_response_tokens(tmp_path):
    assert config_of(tmp_path, 'algorithm = "dr_grpo"\nsampling.max_new_tokens = 77').loss.max_len == 77
    assert config_of(tmp_path, 'algorithm = "dr_grpo"').loss.max_len == config_of(tmp_path, "").sampling.max_new_tokens
    assert config_of(tmp_path, 'algorithm = "dr_grpo"\nloss.max_len = 5').loss.max_len == 5


def test_an_unknown_algorithm_suggests_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'gspo'"):
        config_of(tmp_path, 'algorithm = "gsop"')


def test_kl_in_reward_is_the_sum_over_the_answer_and_comes_before_the_baseline():
    groups = [group(0, 1.0, 0.0, None), group(1, 1.0)]  # log-probabilities -1, -2
    reference = [
        torch.tensor([-1.5, -2.5]),
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-9.0, -9.0]),
        torch.tensor([0.0, 0.0]),
    ]
    changed = kl_in_reward(groups, reference, coefficient=0.1)
    rewards = [r.reward for g in changed for r in g.rollouts]
    assert rewards.pop(2) is None
    assert rewards == pytest.approx([0.9, 0.0, 1.3], abs=1e-12)  # float64
    assert advantages_of(changed, "dr_grpo")[:2] == pytest.approx([0.45, -0.45], rel=1e-12)
    assert kl_in_reward(groups, reference, coefficient=0.0) == groups
    with pytest.raises(NonFiniteError, match="group 1"):
        kl_in_reward(groups, [*reference[:3], torch.tensor([float("nan"), 0.0])], coefficient=0.1)


def test_the_configuration_of_the_real_model_reads():
    path = Path(__file__).parent.parent.parent / "configs" / "smollm2.toml"
    config = load_config(path, ["loop.prompts_per_step=4", "loop.reference_every=0", "eval.num_problems=8"])
    assert (config.algorithm, config.loss.clip_high, config.dynamic.max_rounds) == ("dapo", 0.28, 10)
    assert "{question}" in config.task.template
