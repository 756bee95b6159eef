"""A supervised start: a small model learns to answer a little, so that reinforcement has something to reinforce."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from onegrid.errors import EmptyBatchError
from onegrid.learner.learner import Learner
from onegrid.learner.loss import token_weights
from onegrid.rl.tasks import Prompt, Tokenizer
from onegrid.types import Sequence


def answered(prompts: Seq[Prompt], tokenizer: Tokenizer, *, end_token_id: int) -> list[Sequence]:
    """Every prompt with its right answer and the end token as response."""
    sequences = []
    for prompt in prompts:
        response = [*tokenizer.encode(prompt.answer), end_token_id]
        num = len(response)
        sequences.append(
            Sequence(
                tokens_T=torch.tensor([*prompt.tokens, *response], dtype=torch.int64),
                num_prompt=len(prompt.tokens),
                sampler_logp_R=torch.zeros(num),
                version_R=torch.zeros(num, dtype=torch.int64),
                advantage_R=torch.zeros(num),
                mask_R=torch.ones(num, dtype=torch.bool),
                group_id=prompt.prompt_index,
            )
        )
    return sequences


def supervised_step(learner: Learner, sequences: Seq[Sequence]) -> dict[str, float]:
    """One update on the mean cross-entropy of the response tokens (nats). Raises EmptyBatchError without a sequence."""
    if not sequences:
        raise EmptyBatchError("a supervised step needs at least one sequence")
    weights = token_weights([s.mask_R for s in sequences], "token_mean")
    total = 0.0
    for indices in learner.plan_micro_batches(sequences):
        logp, _ = learner.forward([sequences[i] for i in indices], 1.0)
        weight_N = torch.cat([weights[i] for i in indices]).to(learner.device)
        loss = -(weight_N * torch.cat(logp)).sum()
        loss.backward()
        total += float(loss.detach())
    return {"train/loss": total, **learner.step()}
