"""The expectation of a pairing that is not exact: the same tokens again, in the embedded decoder on the plan's grids.

The learner knows the sampler's plan, so it can compute what a sampler in order would have reported for some sequences
of the batch at hand: same weights, same step, nothing taken from the run's own past. Where the sampler promises bits
and every scale belongs to one token, that is the very number: mixed pairings are then judged as exact ones are.

Elsewhere the plan leaves something open: an engine's order of sums and its roundings in between, and scales of a whole
batch. How much that makes is measured on the same tokens by a second replay: with every output of a linear and of
attention moved by one step of BF16 up or down half of the time, and, where scales span the batch, with every sequence
alone. That moves an output by a variance of half a step squared, six times that of one more rounding. Allowed is what
this second replay is away from the first, times `band`; what the sampler is away from the first is tested against it,
prompt by prompt, by `chart.Detector`. The claim that is tested: for each prompt the sampler's distance is drawn as the
allowed one, or smaller. A fault below that is not seen here; audit and digest see those of weights whatever their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onegrid.errors import NonFiniteError
from onegrid.formats import QUANTIZERS
from onegrid.guard.chart import Detector, contrast
from onegrid.guard.replay import replay, sampler_side
from onegrid.guard.verdict import Verdict, could_not_tell, failed, passed
from onegrid.learner.learner import Learner
from onegrid.mismatch.metrics import compare
from onegrid.recipe import Plan
from onegrid.types import Batch

CHECK, CONDITION = "sentinel", "C6"
NAME = "replay"
BATCH = 2.0
"""Allowed factor, in nats, where scales span the batch: how a sampler cuts its calls is not known, and one by one is
only one way."""
CAUSE = "these tokens were computed otherwise than the plan says: another grid, kernel, cache, temperature or version"


def rows_are_alone(plan: Plan) -> bool:
    """Whether every scale of the sampler's activations belongs to one token."""
    names = {t.sampler_activation for t in plan.tensors.values()} - {None}
    return all(QUANTIZERS[name].is_per_token for name in names if name)


def chosen(batch: Batch, num: int, *, turn: int) -> list[int]:
    """Up to `num` indices of sequences that have a token in the loss: one of each group before a second of any.

    turn  begins with other groups, and other members of them, each time
    """
    groups: dict[int, list[int]] = {}
    for index, s in enumerate(batch.sequences):
        if bool(s.mask_R.any()):
            groups.setdefault(s.group_id, []).append(index)
    rows = [_turned(members, turn) for members in _turned(list(groups.values()), turn)]
    deepest = max(map(len, rows), default=0)
    return [row[depth] for depth in range(deepest) for row in rows if depth < len(row)][:num]


@torch.no_grad()
def predict(
    learner: Learner,
    batch: Batch,
    logp: Sequence[Tensor],
    *,
    bits: bool,
    num: int,
    band: float,
    detector: Detector,
) -> Verdict:
    """Measured against replayed, for some sequences of a batch that the learner's present version sampled.

    logp  FP32 [R] per sequence, of the learner
    bits  whether the sampler promises the embedded decoder's bits
    num   sequences to replay
    band  factor on what is allowed, in nats
    Raises NonFiniteError where a replay gives NaN or Inf.
    """
    indices = chosen(batch, num, turn=learner.version)
    if not indices:
        return could_not_tell(CHECK, CONDITION, expected="tokens to replay", found="none takes part in the loss")
    sequences = [batch.sequences[i] for i in indices]
    masks = [s.mask_R.cpu() for s in sequences]
    side, alone = sampler_side(learner), rows_are_alone(learner.plan)
    again = [x.cpu() for x in replay(side, sequences, batch.temperature)]
    reported = [s.sampler_logp_R.cpu() for s in sequences]
    mine = [logp[i].cpu() for i in indices]
    k3 = [compare(mine, theirs, masks)["mismatch/k3"] for theirs in (reported, again)]
    told = f"k3 {k3[0]:.3g} measured and {k3[1]:.3g} by replay, of {len(sequences)} sequences"
    if bits and alone:
        pairs = zip(reported, again, masks, strict=True)
        wrong = sum(int((x.view(torch.int32) != y.view(torch.int32))[m].sum()) for x, y, m in pairs)
        if not wrong:
            return passed(CHECK, CONDITION, found=told)
        expected = "the bits that the plan's sampler gives for these tokens, by replay"
        found = f"others for {wrong} of {sum(map(int, map(torch.sum, masks)))} tokens; {told}"
        return failed(CHECK, CONDITION, expected=expected, found=found, cause=CAUSE)
    generator = torch.Generator(device=learner.device).manual_seed(learner.version)
    change = None if bits else stepped(generator)
    parts = [sequences] if alone else [[s] for s in sequences]
    other = [x.cpu() for part in parts for x in replay(side, part, batch.temperature, change=change)]
    sizes = _by_group([s.group_id for s in sequences], again, reported, other, masks)
    factor = band if alone else band * BATCH
    alarm = detector.add(NAME, [contrast(measured, allowed * factor**2) for measured, allowed in sizes])
    away, allowed = ((sum(pair[i] for pair in sizes) / len(sizes)) ** 0.5 for i in (0, 1))
    told += f"; {away:.3g} nats from the replay (root mean square), {allowed * factor:.3g} allowed"
    if not alarm:
        return passed(CHECK, CONDITION, found=told)
    expected = "log-probabilities as near to the replay as the plan leaves open"
    return failed(CHECK, CONDITION, expected=expected, found=told, cause=CAUSE)


def _by_group(
    groups: Sequence[int],
    again: Sequence[Tensor],
    reported: Sequence[Tensor],
    other: Sequence[Tensor],
    masks: Sequence[Tensor],
) -> list[tuple[float, float]]:
    """Mean squares over the tokens of each prompt: of reported and of the second replay, both from the first."""
    apart: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for group, first, *others, mask in zip(groups, again, reported, other, masks, strict=True):
        for found, x in zip(apart.setdefault(group, ([], [])), others, strict=True):
            found.append((first.double() - x.double())[mask])
    sizes = [tuple(float(torch.cat(x).square().mean()) for x in pair) for pair in apart.values()]
    if not all(map(math.isfinite, [x for pair in sizes for x in pair])):
        raise NonFiniteError("log-probabilities of a replay on the plan's grids are NaN or Inf")
    return [(measured, allowed) for measured, allowed in sizes]


def stepped(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Moves BF16 numbers to a neighbour: up with probability 1/4, down with 1/4. Zeros stay."""

    def change(y: Tensor) -> Tensor:
        draw = torch.randint(0, 4, y.shape, generator=generator, device=y.device)
        step = (draw == 0).to(torch.int16) - (draw == 1).to(torch.int16)
        return torch.where(y == 0, y, (y.contiguous().view(torch.int16) + step).view(torch.bfloat16))

    return change


def _turned(items: list, turn: int) -> list:
    at = turn % max(1, len(items))
    return items[at:] + items[:at]
