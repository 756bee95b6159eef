"""Rollouts made by hand, for the tests of this folder."""

from __future__ import annotations

import torch

from onegrid.types import Group, Request, Rollout, Sampling


def rollout(prompt_index, sample, *, length=2, text="", reward=None, scored=True, finish="stop", prompt=(1, 5)):
    """A rollout with recognisable tokens 100, 101, ... and log-probabilities -1, -2, ..."""
    return Rollout(
        request=Request(
            prompt_index=prompt_index, sample=sample, prompt_tokens=prompt, seed=0, sampling=Sampling(max_new_tokens=8)
        ),
        tokens_R=torch.arange(100, 100 + length),
        logp_R=-torch.arange(1, 1 + length, dtype=torch.float32),
        version_R=torch.full((length,), 7),
        finish=finish,
        text=text,
        reward=reward,
        scored=scored,
    )


def group(group_id, *rewards, **settings):
    """A scored group with these rewards."""
    return Group(
        group_id=group_id,
        rollouts=tuple(rollout(group_id, i, reward=reward, **settings) for i, reward in enumerate(rewards)),
    )
