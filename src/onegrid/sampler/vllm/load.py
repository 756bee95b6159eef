"""Canonical bytes into a live model, through vLLM's own layer-by-layer reload, into the storage that it has.

What that reload does not do is done here. Experts whose kernel exists are not packed again on a CPU (vLLM 0.32; without
this, `verify` finds plain weights in packed storage after every update). The copy of the embedding that the kernel of a
tied head may keep is not renewed. An interrupted reload leaves layers half restored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onegrid.sampler.vllm.verify import Inside
from onegrid.sampler.vllm.wire import checkpoint_items


def load(inside: Inside, model_config: Any) -> None:
    """Every tensor of the version. What the engine's loader skips is for `verify` to find."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = inside.model
    forget_kernels(model)
    initialize_layerwise_reload(model)
    try:
        model.load_weights(  # type: ignore[operator]
            checkpoint_items(
                ((name, inside.canonical(name)) for name in inside.tensors), inside.plan, inside.road, inside.dtype
            )
        )
    finally:
        finalize_layerwise_reload(model, model_config)
    renew_tied_head(model)


def forget_kernels(model: nn.Module) -> None:
    """Experts on a CPU are packed only while their kernel is made, so it has to be made again."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None and type(experts).__module__.endswith(".cpu_moe"):
            method.moe_kernel = None  # type: ignore[union-attr]


def renew_tied_head(model: nn.Module) -> None:
    """A tied head shares the embedding's storage, but not the copy that its kernel may have made."""
    head: Any = getattr(model, "lm_head", None)
    embedding: Any = model.get_submodule("model").embed_tokens
    if head is None or head is embedding or "cpu_linear" not in getattr(head, "__dict__", {}):
        return
    if head.weight.data_ptr() == embedding.weight.data_ptr():
        head.quant_method.process_weights_after_loading(head)


def settle_buffers(inside: Inside) -> None:
    """Scales of the cache that dummy weights have made random go back to 1."""
    for name, buffer in inside.model.named_buffers():
        leaf = name.rpartition(".")[2]
        if leaf in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale") and buffer.dtype == torch.float32:
            buffer.fill_(1.0)
