"""The faults that must be caught, by name: how each gets in, what it breaks, and which checks see it.

A row is a claim that tests and campaign put to the proof: `fires` lists every check that objects when all are asked,
and no other may. `transaction` refuses on its own, before the others are asked; `wake` is the proof after a sleep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from onegrid.errors import ConfigError
from onegrid.guard import inject_grid as grid
from onegrid.guard import inject_learner as learner
from onegrid.guard import inject_state as state
from onegrid.guard import inject_transfer as transfer
from onegrid.guard.causes import HEAD, OLD_ADDRESSES, OTHER_CACHE, TABLES
from onegrid.guard.injection import Bench

AUDIT, DIGEST, STORAGE, SELF, PROBE = "audit", "digest", "storage", "selfcheck", "probe"
FRESH, SENTINEL, BYTES, TRANSACTION, WAKE = "freshness", "sentinel", "bytes", "transaction", "wake"
FINITE = "finite"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way to go wrong."""

    name: str
    condition: str
    """What it breaks."""
    what: str
    inject: Callable[[Bench], None]
    fires: tuple[str, ...]
    """Checks that must object, in the order of the guard; empty for a change that is no fault."""
    reported: tuple[str, ...] = ()
    """Conditions under which a check may report it; empty for `condition` alone."""
    cause: str = ""
    """The cause that the check that names it rightly must give; empty where any will do."""
    names: bool = True
    """Whether it concerns canonical tensors, which a check must then name exactly."""
    model: str = "moe"
    """Model of the bench: "moe", or "tied" with a head that is the embedding."""
    preset: str = "mxfp8"
    published: str = ""
    """Its number in the published table."""


def _fault(name: str, condition: str, what: str, inject: Callable[[Bench], None], *fires: str, **more) -> Fault:
    return Fault(name=name, condition=condition, what=what, inject=inject, fires=fires, **more)


_WEIGHTS = (DIGEST, SELF, PROBE, SENTINEL)
_ROWS = (
    _fault(
        "lm_head_quantized",
        "C1",
        "lm_head is quantized in the sampler",
        grid.regrid(grid.keys_like("lm_head.weight"), grid.as_quantizer("mxfp8")),
        AUDIT,
        DIGEST,
        PROBE,
        SENTINEL,
        published="F1",
    ),
    _fault(
        "gate_up_in_bf16",
        "C1",
        "an exclusion that is read as part of a name leaves gate and up of all experts in BF16",
        grid.regrid(grid.keys_like("gate_proj.weight", "up_proj.weight"), grid.plain, activation=None),
        AUDIT,
        *_WEIGHTS,
        published="F2",
    ),
    _fault(
        "embedding_quantized",
        "C1",
        "the embedding is quantized in the sampler",
        grid.regrid(grid.keys_like("embed_tokens.weight"), grid.as_quantizer("mxfp8")),
        AUDIT,
        DIGEST,
        PROBE,
        SENTINEL,
    ),
    _fault(
        "router_quantized",
        "C1",
        "the routers are quantized in the sampler",
        grid.regrid(grid.keys_like("mlp.gate.weight"), grid.as_quantizer("mxfp8")),
        AUDIT,
        DIGEST,
        PROBE,
        SENTINEL,
    ),
    _fault(
        "norm_rounded",
        "C2",
        "a norm's weight is rounded to FP8 where it is read",
        grid.norm_rounded,
        DIGEST,
        PROBE,
        SENTINEL,
    ),
    _fault(
        "activations_in_bf16",
        "C1",
        "the sampler does not quantize the inputs of one layer's attention",
        grid.activation_grid(None),
        AUDIT,
        SELF,
        PROBE,
        SENTINEL,
    ),
    _fault(
        "activations_floor",
        "C1",
        "the sampler takes floor exponents for the inputs of one layer's attention",
        grid.activation_grid("mxfp8_floor"),
        AUDIT,
        SELF,
        SENTINEL,
    ),
    _fault(
        "cache_in_fp8",
        "C1",
        "the sampler keeps keys and values in FP8, the plan says BF16",
        state.cache_grid,
        STORAGE,
        PROBE,
        SENTINEL,
        names=False,
        cause=OTHER_CACHE,
    ),
    _fault(
        "floor_exponents",
        "C2",
        "the sampler's own MXFP8 takes floor exponents",
        grid.regrid(grid.keys_like("o_proj.weight"), grid.as_quantizer("mxfp8_floor", disguised=True)),
        *_WEIGHTS,
    ),
    _fault(
        "divided_scales",
        "C2",
        "the sampler divides by amax / 448 where the plan multiplies by the reciprocal",
        grid.regrid(grid.keys_like("o_proj.weight"), grid.as_quantizer("fp8_row_divided", disguised=True)),
        *_WEIGHTS,
        preset="fp8_row",
    ),
    _fault(
        "fp32_scales",
        "C2",
        "FP32 block scales where the other side keeps only the exponent",
        grid.regrid(grid.keys_like("o_proj.weight"), grid.as_quantizer("fp8_128x128_fp32", disguised=True)),
        *_WEIGHTS,
        preset="fp8_block",
        published="F6",
    ),
    _fault(
        "separate_amax",
        "C2",
        "gate and up have separate global scales in the sampler",
        grid.regrid(grid.keys_like("gate_proj.weight", "up_proj.weight"), grid.own_amax),
        *_WEIGHTS,
        preset="nvfp4_experts",
    ),
    _fault(
        "shard_amax",
        "C2",
        "the sampler takes a global scale per tensor-parallel shard",
        grid.regrid(grid.keys_like("down_proj.weight"), grid.shard_amax),
        *_WEIGHTS,
        preset="nvfp4_experts",
    ),
    _fault(
        "one_byte_of_one_expert",
        "C2",
        "one bit of one code of one expert of the last layer",
        grid.one_byte_of_one_expert,
        DIGEST,
        SELF,
        SENTINEL,
    ),
    _fault("scale_off_by_one", "C2", "one scale byte is one too large", grid.scale_off_by_one, *_WEIGHTS),
    _fault("stale_scales", "C2", "new codes under the scales of before", grid.stale_scales, *_WEIGHTS),
    _fault("permuted", "C2", "content in another order, shape and dtype kept", grid.permuted_rows, *_WEIGHTS),
    _fault("gate_up_swapped", "C2", "gate and up have changed places", grid.gate_and_up_swapped, *_WEIGHTS),
    _fault("nan_code", "C2", "a code that means NaN", grid.nan_code, *_WEIGHTS, reported=("C2", "C6")),
    _fault(
        "operand_not_rebuilt",
        "C3",
        "the layout that one kernel reads is not made again after the update",
        state.not_derived(state.moved_key),
        *_WEIGHTS,
        published="F3",
    ),
    _fault(
        "experts_not_repacked",
        "C3",
        "no expert is repacked after the update, shapes and dtypes are right",
        state.not_derived(state.expert_keys),
        *_WEIGHTS,
        published="F4",
    ),
    _fault(
        "layout_swaps_gate_and_up",
        "C3",
        "the kernel's layout has gate and up in each other's place",
        state.layout_swapped,
        *_WEIGHTS,
        published="F5",
    ),
    _fault(
        "operand_permuted", "C3", "a repacked expert with its rows in another order", state.operand_permuted, *_WEIGHTS
    ),
    _fault(
        "tied_copy",
        "C3",
        "a head that keeps an old copy of the embedding",
        state.tied_copy,
        STORAGE,
        PROBE,
        SENTINEL,
        names=False,
        cause=HEAD,
        model="tied",
    ),
    _fault(
        "table_corrupted",
        "C3",
        "a buffer that no checkpoint holds comes back wrong",
        state.table_corrupted,
        STORAGE,
        PROBE,
        SENTINEL,
        names=False,
        cause=TABLES,
    ),
    _fault(
        "outside_graph_storage",
        "C4",
        "one layer's update is written outside the storage that serves",
        state.graph_with_old_addresses(True),
        STORAGE,
        PROBE,
        SENTINEL,
        cause=OLD_ADDRESSES,
    ),
    _fault(
        "graph_with_old_addresses",
        "C4",
        "what serves was captured with the old addresses",
        state.graph_with_old_addresses(False),
        STORAGE,
        PROBE,
        SENTINEL,
        cause=OLD_ADDRESSES,
    ),
    _fault(
        "other_epsilon",
        "C6",
        "the sampler's norms have another epsilon, which is no tensor's",
        state.other_epsilon,
        PROBE,
        SENTINEL,
        reported=("C4", "C6"),
        names=False,
    ),
    _fault(
        "shared_kernel_wrong",
        "C6",
        "both sides share a kernel that is wrong for one linear, so they agree",
        state.shared_kernel_wrong,
        SELF,
        reported=("C3", "C6"),
    ),
    _fault(
        "other_temperature",
        "C6",
        "the sampler draws and reports at another temperature than it was asked for",
        transfer.other_temperature,
        SENTINEL,
        names=False,
    ),
    _fault("bucket_lost", "C5", "a bucket never arrives", transfer.bucket_lost, TRANSACTION, *_WEIGHTS),
    _fault("bucket_twice", "C5", "a bucket arrives twice", transfer.bucket_twice, TRANSACTION, names=False),
    _fault("bucket_cut", "C5", "half of a bucket's last piece arrives", transfer.bucket_cut, TRANSACTION, *_WEIGHTS),
    _fault("buckets_reordered", "C5", "buckets in another order: no fault", transfer.buckets_reordered, names=False),
    _fault(
        "wire_breaks",
        "C5",
        "the transfer fails half way",
        transfer.wire_breaks,
        TRANSACTION,
        *_WEIGHTS,
        names=False,
    ),
    _fault("byte_on_the_wire", "C2", "a byte changes on the way", transfer.byte_on_the_wire, *_WEIGHTS),
    _fault(
        "scales_stay_zero",
        "C2",
        "scales that are never written and hold zeros",
        transfer.scales_never_sent(0),
        *_WEIGHTS,
    ),
    _fault(
        "scales_stay_nan",
        "C2",
        "scales that are never written and hold NaN",
        transfer.scales_never_sent(255),
        *_WEIGHTS,
        reported=("C2", "C6"),
    ),
    _fault(
        "loader_hook_lost",
        "C2",
        "one tensor keeps its old bytes and the update reports success",
        transfer.skipped(transfer.one_moved),
        *_WEIGHTS,
    ),
    _fault(
        "names_skipped",
        "C2",
        "names outside the quantized layers are skipped: norms, embedding, router",
        transfer.skipped(transfer.norms_moved),
        DIGEST,
        PROBE,
        SENTINEL,
    ),
    _fault(
        "fused_name_unknown",
        "C2",
        "q, k and v keep their old bytes: the loader does not know their fused name",
        transfer.skipped(transfer.attention_moved),
        *_WEIGHTS,
    ),
    _fault(
        "commit_ignored",
        "C4",
        "an update that changes nothing, counts up and answers with the digests it was sent",
        transfer.commit_ignored,
        SELF,
        PROBE,
        SENTINEL,
        reported=("C3", "C4"),
        names=False,
    ),
    _fault("lost_in_sleep", "C2", "sleep loses part of a tensor", transfer.lost_in_sleep, WAKE, SENTINEL),
    _fault("prefix_kept", "C7", "cached prompts survive an update", transfer.prefix_kept, FRESH, SENTINEL, names=False),
    _fault("in_flight", "C7", "a completion from before the update", transfer.in_flight, FRESH, names=False),
    _fault(
        "version_reset",
        "C7",
        "the version counter begins anew",
        transfer.version_reset,
        TRANSACTION,
        FRESH,
        names=False,
    ),
    _fault(
        "learner_reads_other_codes",
        "C2",
        "the learner's forward reads a code that it does not publish",
        learner.forward_reads_other_codes,
        BYTES,
        PROBE,
        SENTINEL,
        reported=("C2", "C3"),
    ),
    _fault(
        "update_not_quantized",
        "C2",
        "the learner publishes codes of the version before",
        learner.update_not_quantized,
        BYTES,
    ),
    _fault(
        "learner_keeps_a_copy",
        "C2",
        "a linear of the learner reads an old copy",
        learner.forward_copy,
        BYTES,
        PROBE,
        SENTINEL,
    ),
    _fault("backward_ignored", "C2", "one linear runs another backward than planned", learner.backward_ignored, BYTES),
    _fault("nan_in_master", "C6", "one weight of the learner is NaN", learner.nan_in_master, FINITE, names=False),
)

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ROWS}
"""Every fault by name."""


def fault(name: str) -> Fault:
    """The fault of that name. ConfigError with the nearest names otherwise."""
    if name not in FAULTS:
        near = ", ".join(map(repr, get_close_matches(name, FAULTS, n=3, cutoff=0.4)))
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(f"no fault is called {name!r}; {hint}`onegrid faults --list` names all {len(FAULTS)}")
    return FAULTS[name]
