"""Probe (C4): fixed prompts through what serves, against the learner's own answer.

In the embedded engine the two are the same bytes: in an exact pairing by the learner's forward itself, else by a second
copy of the weights on the sampler's grid. So whatever the digest does not cover, such as tables, tied copies, the grid
of the cache and the storage that a graph reads, shows here. An external engine is held to its calibrated band, and to
giving other answers than the version before when the weights have changed. One token's difference may be small by
chance whatever is broken, and large by chance where nothing is: there the mean over some tokens counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onegrid.guard.causes import DERIVED, OLD_ADDRESSES
from onegrid.guard.replay import weights_of
from onegrid.guard.verdict import Verdict, closed, could_not_tell, failed, passed
from onegrid.learner.learner import Learner
from onegrid.model.canonical import Snapshot
from onegrid.sampler.base import Sampler
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.types import Batch
from onegrid.types import Sequence as Training

CHECK, CONDITION = "probe", "C4"
LENGTH = 12
TOKENS = 8
"""How many log-probabilities are compared where bits are not promised."""


def probe_prompts(vocab_size: int, *, longest: int = LENGTH) -> list[tuple[int, ...]]:
    """One prompt, so that every engine computes it in one piece; the same for one model."""
    return [tuple((7 * i * i + 3 * i + 1) % vocab_size for i in range(min(LENGTH, longest)))]


@torch.no_grad()
def probe(
    learner: Learner,
    sampler: Sampler,
    snapshot: Snapshot,
    prompts: Sequence[tuple[int, ...]],
    *,
    previous: Sequence[Tensor] | None,
    changed: bool,
    band: float | None,
    eager: bool = True,
) -> tuple[Verdict, list[Tensor]]:
    """The verdict, and the answers for the next one.

    eager     also without graphs, where the sampler has them; where it has none, in any case
    previous  answers of the version before
    changed   whether any code or value has moved since
    band      largest allowed mean difference in nats where bits are not promised; None: nothing is known
    """
    answers: list[Tensor] = []

    def examine() -> Verdict:
        captured = sampler.capabilities.captured
        found = {"captured": sampler.probe(prompts, captured=True)} if captured else {}
        if eager or not captured:
            found = {"eager": sampler.probe(prompts, captured=False), **found}
        answers[:] = next(iter(found.values()))
        return _judge(learner, sampler, snapshot, prompts, found, previous=previous, changed=changed, band=band)

    return closed(CHECK, CONDITION, examine), answers


def _judge(
    learner: Learner,
    sampler: Sampler,
    snapshot: Snapshot,
    prompts: Sequence[tuple[int, ...]],
    found: Mapping[str, list[Tensor]],
    *,
    previous: Sequence[Tensor] | None,
    changed: bool,
    band: float | None,
) -> Verdict:
    shape = (learner.spec.vocab_size,)
    for answers in found.values():
        if len(answers) != len(prompts) or any(tuple(x.shape) != shape for x in answers):
            return could_not_tell(CHECK, CONDITION, expected=f"{len(prompts)} answers {shape}", found=_shapes(answers))
        bad = sum(int((~torch.isfinite(x)).sum()) for x in answers)
        if bad:
            told = f"{bad} NaN or Inf"
            return failed(CHECK, "C6", expected="finite log-probabilities", found=told, cause="weights that overflow")
    bits, exact = sampler.capabilities.bits, learner.plan.exact
    targets = _targets(learner.spec.vocab_size, snapshot.version, 1 if bits else TOKENS)
    if bits and not exact:
        expected = twin_answers(learner, snapshot, prompts)
    else:
        expected = learner_answers(learner, prompts, targets)
    for way, answers in found.items():
        shown = answers if bits and not exact else [x[list(targets)] for x in answers]
        apart = max(float((x - y).abs().max()) for x, y in zip(shown, expected, strict=True))
        mean = max(float((x - y).abs().mean()) for x, y in zip(shown, expected, strict=True))
        as_before = previous is not None and all(torch.equal(x, y) for x, y in zip(answers, previous, strict=True))
        if bits and any(not torch.equal(x, y) for x, y in zip(shown, expected, strict=True)):
            return failed(
                CHECK,
                CONDITION,
                expected="the learner's own answer, byte for byte",
                found=f"{way}: log-probabilities apart by up to {apart:.3g} nats" + (_BEFORE if as_before else ""),
                cause=OLD_ADDRESSES if as_before else DERIVED,
            )
        if not bits and as_before and changed:
            told = f"{way}: the answer of the version before, though weights have changed"
            return failed(CHECK, CONDITION, expected="another answer", found=told, cause=OLD_ADDRESSES)
        if not bits and band is None:
            told = f"{way}: apart by {mean:.3g} nats on average, and no band is calibrated (guard.probe_band)"
            return could_not_tell(CHECK, CONDITION, expected="an answer within the band", found=told)
        if not bits and band is not None and not mean <= band:
            told = f"{way}: apart by {mean:.3g} nats on average of {len(targets)} tokens, by {apart:.3g} at most"
            return failed(CHECK, CONDITION, expected=f"within {band:.3g} nats", found=told, cause=DERIVED)
    return passed(CHECK, CONDITION)


def learner_answers(learner: Learner, prompts: Sequence[tuple[int, ...]], targets: tuple[int, ...]) -> list[Tensor]:
    """FP32 log-probabilities, at temperature 1, of `targets` after each prompt, by the learner's forward."""
    sequences = tuple(_training(prompt, target) for prompt in prompts for target in targets)
    logp = torch.cat(learner.log_probs(Batch(sequences=sequences))).cpu()
    return list(logp.view(len(prompts), len(targets)).unbind())


def twin_answers(learner: Learner, snapshot: Snapshot, prompts: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """FP32 [V] of a fresh copy of the snapshot on the sampler's grid, as the embedded engine computes it."""
    twin = weights_of(learner, snapshot.tensors)
    config = SamplerConfig(max_slots=1, max_len=max(map(len, prompts)))
    return Engine(twin, config, version=snapshot.version).probe(prompts)


def training(prompts: Sequence[tuple[int, ...]]) -> Batch:
    """The prompts as sequences whose last token, any, is to be predicted."""
    return Batch(sequences=tuple(_training(prompt, 0) for prompt in prompts))


def _targets(vocab_size: int, version: int, count: int) -> tuple[int, ...]:
    """Tokens whose log-probabilities are compared; each holds the sum over the whole vocabulary; others each time."""
    first, step = version * 7919 + vocab_size // 2, max(1, vocab_size // count)
    return tuple(dict.fromkeys((first + i * step) % vocab_size for i in range(count)))


def _training(prompt: tuple[int, ...], target: int) -> Training:
    one = torch.zeros(1)
    return Training(
        tokens_T=torch.tensor([*prompt, target]),
        num_prompt=len(prompt),
        sampler_logp_R=one,
        version_R=torch.zeros(1, dtype=torch.int64),
        advantage_R=one,
        mask_R=torch.ones(1, dtype=torch.bool),
        group_id=0,
    )


def _shapes(answers: Sequence[Tensor]) -> str:
    return f"{len(answers)} answers {[tuple(x.shape) for x in answers]}"


_BEFORE = ", and they are those of the version before"
