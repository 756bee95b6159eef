"""What a plan promises: whether learner and sampler are the same bits, and what depends on how a batch was split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from onegrid.formats import QUANTIZERS
from onegrid.recipe.plan import TensorPlan


def reasons_of(tensors: Iterable[TensorPlan], *, kv_cache: str, learner_kv: str) -> tuple[str, ...]:
    """Why the pairing cannot be exact; empty when it is.

    Exact needs: the same quantizers on both sides, activations whose codes depend on their own token only, and the
    learner's attention on the same grid as the sampler's cache.
    """
    tensors = list(tensors)
    reasons = []
    mixed = Counter(
        (t.weight or "bf16", t.activation or "bf16", t.sampler_weight or "bf16", t.sampler_activation or "bf16")
        for t in tensors
        if t.mixed
    )
    for (weight, activation, sampler_weight, sampler_activation), count in mixed.items():
        reasons.append(
            f"mixed pairing: {count} tensors are {weight} with {activation} inputs in the learner and "
            f"{sampler_weight} with {sampler_activation} inputs in the sampler"
        )
    per_batch = Counter(name for t in tensors for name in {t.activation, t.sampler_activation} if _spans_tokens(name))
    for name, count in per_batch.items():
        offer = "fp8_row" if name and name.startswith("fp8") else "nvfp4_row" if name and "nvfp4" in name else None
        offered = f"; {offer} has one per token" if offer else ""
        reasons.append(f"inputs of {count} tensors are {name}, where one scale spans the batch{offered}")
    if kv_cache != learner_kv:
        reasons.append(f"the sampler's key/value cache is {kv_cache}, the learner's keys and values are {learner_kv}")
    return tuple(reasons)


def notes_of(tensors: Iterable[TensorPlan]) -> tuple[str, ...]:
    """Gradients of a quantized backward that depend on the micro-batch split, whatever the padding."""
    quantized = [t for t in tensors if t.backward == "quantized"]
    notes = []
    routed = sum(t.kind == "routed_expert" for t in quantized)
    if routed:
        notes.append(
            f"weight gradients of {routed} routed experts depend on the micro-batch split: blocks along tokens hold "
            f"the tokens that were routed together; the bound is the quantizer's error"
        )
    across = {n for t in quantized for n in (t.activation, t.gradient) if n and QUANTIZERS[n].span != "none"}
    if across:
        count = sum(not across.isdisjoint({t.activation, t.gradient}) for t in quantized)
        notes.append(
            f"gradients of {count} tensors depend on the micro-batch split: a scale of {', '.join(sorted(across))} "
            f"spans its tokens; the bound is the quantizer's error"
        )
    along = {QUANTIZERS[n].block[1] for t in quantized for n in (t.activation, t.gradient) if n} - {None}
    if along:
        notes.append(
            f"other weight gradients do not depend on the split if every sequence starts at a multiple of "
            f"{max(int(b) for b in along if b)} tokens"
        )
    return tuple(notes)


def _spans_tokens(name: str | None) -> bool:
    return name is not None and not QUANTIZERS[name].is_per_token
