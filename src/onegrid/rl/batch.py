"""From prompts to requests, from rollouts to groups, from groups to the batch that the learner eats.

Token ids and log-probabilities go through untouched: what is learned from is what was sampled, never text encoded
again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from onegrid.errors import ConfigError, EmptyBatchError, MismatchError
from onegrid.rl.tasks import Prompt
from onegrid.types import Batch, Group, Request, Rollout, Sampling, Sequence

TRUNCATED = ("keep", "mask")


def make_requests(
    prompts: Seq[Prompt], samples: int, *, seed: int, sampling: Sampling, first_sample: int = 0
) -> list[Request]:
    """`samples` requests for every prompt, prompt by prompt, from the sample of a number on. seed is that of run and
    step."""
    return [
        Request(
            prompt_index=prompt.prompt_index, sample=sample, prompt_tokens=prompt.tokens, seed=seed, sampling=sampling
        )
        for prompt in prompts
        for sample in range(first_sample, first_sample + samples)
    ]


def group_rollouts(rollouts: Seq[Rollout]) -> list[Group]:
    """Rollouts by prompt index, whatever their order: groups ascending by index, rollouts by sample."""
    by_index: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        by_index.setdefault(rollout.request.prompt_index, []).append(rollout)
    return [
        Group(group_id=index, rollouts=tuple(sorted(by_index[index], key=lambda r: r.request.sample)))
        for index in sorted(by_index)
    ]


def pack(
    groups: Seq[Group], advantages: Seq[float | None], *, truncated: str = "keep", temperature: float = 1.0
) -> Batch:
    """The batch of one update: one sequence per rollout, in the order of the groups.

    advantages   one per rollout, in that order (rl/advantage.py); None masks the whole sequence
    truncated    "keep" learns from completions cut at the cap as from others; "mask" leaves them out of the loss,
                 though their reward still counts in the baseline of their group
    temperature  that of the sampler, which the learner's log-probabilities must share

    Raises MismatchError where a rollout's tokens, log-probabilities and versions differ in number, ConfigError for an
    unknown rule, EmptyBatchError without a rollout.
    """
    if truncated not in TRUNCATED:
        raise ConfigError(f'the rule for truncated rollouts is "{truncated}"; allowed are {", ".join(TRUNCATED)}')
    rollouts = [(group.group_id, rollout) for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise EmptyBatchError(f"{len(groups)} groups hold 0 rollouts; there is nothing to learn from")
    sequences = []
    for (group_id, rollout), advantage in zip(rollouts, advantages, strict=True):
        masked = advantage is None or (truncated == "mask" and rollout.finish == "length")
        sequences.append(_sequence(rollout, group_id, advantage=advantage or 0.0, masked=masked))
    return Batch(sequences=tuple(sequences), temperature=temperature)


def _sequence(rollout: Rollout, group_id: int, *, advantage: float, masked: bool) -> Sequence:
    num_response = rollout.tokens_R.numel()
    if not num_response == rollout.logp_R.numel() == rollout.version_R.numel():
        raise MismatchError(
            f"prompt {rollout.request.prompt_index}, sample {rollout.request.sample}: the sampler gave {num_response} "
            f"tokens, {rollout.logp_R.numel()} log-probabilities and {rollout.version_R.numel()} versions; "
            "all must be equally many"
        )
    device = rollout.tokens_R.device
    prompt_P = torch.tensor(rollout.request.prompt_tokens, dtype=torch.int64, device=device)
    return Sequence(
        tokens_T=torch.cat([prompt_P, rollout.tokens_R]),
        num_prompt=prompt_P.numel(),
        sampler_logp_R=rollout.logp_R,
        version_R=rollout.version_R,
        advantage_R=torch.full((num_response,), advantage, dtype=torch.float32, device=device),
        mask_R=torch.full((num_response,), not masked, dtype=torch.bool, device=device),
        group_id=group_id,
        kept=rollout.kept,
        routing_RLE=rollout.routing_RLE,
    )
