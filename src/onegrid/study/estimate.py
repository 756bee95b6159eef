"""How much memory a run will take, before it takes it. Exact for what is allocated once, rough for activations."""

from __future__ import annotations

import math

from onegrid.formats import QUANTIZERS
from onegrid.learner.config import LoraConfig
from onegrid.learner.lora import adapter_shapes
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.stacks import stacks
from onegrid.recipe import Plan
from onegrid.study.parts import Design


def memory_estimate(design: Design) -> dict[str, int]:
    """Bytes by what they hold, in the order of a run's life.

    Weights, optimizer and key/value slots are counted from shapes; activations are those of one micro-batch of the
    largest size, with about ten numbers per hidden unit and layer kept for the backward pass.
    """
    spec, config = design.spec, design.config
    num_weights = sum(math.prod(shape) for shape in tensor_shapes(spec).values())
    operand = 4 if config.device == "cpu" else 2
    rows = config.learner.max_tokens
    width = spec.intermediate_size if not spec.moe_layers else spec.moe_intermediate_size * spec.top_k
    kept_layers = 1 if config.learner.recompute else spec.num_layers
    row = kept_layers * (10 * spec.hidden_size + 5 * width) + spec.vocab_size
    sampler = config.sampler
    found = {
        "learner: FP32 masters": 4 * num_weights,
        **_trained_bytes(spec, config.learner.lora, num_weights),
        "learner: codes and scales": published_bytes(spec, design.plan, "weight"),
        **_operand_bytes(spec, design.plan, "learner", operand, kept=config.learner.weights == "decoded"),
        "learner: activations (rough)": 4 * rows * row,
        "sampler: codes and scales": published_bytes(spec, design.plan, "sampler_weight"),
        "sampler: staged update": published_bytes(spec, design.plan, "sampler_weight"),
        **_operand_bytes(spec, design.plan, "sampler", operand, kept=sampler.weights != "codes"),
        "sampler: key/value slots": 4
        * sampler.max_slots
        * sampler.max_len
        * spec.num_layers
        * spec.num_kv_heads
        * spec.head_dim,
    }
    if config.loop.reference_every:
        found["reference: masters, codes and operands"] = (6 + operand) * num_weights
    return found | {"total": sum(found.values())}


def _trained_bytes(spec: ModelSpec, lora: LoraConfig | None, num_weights: int) -> dict[str, int]:
    """Gradients and moments of what is trained. Adapters need a copy of the base, here taken as BF16, as published."""
    if lora is None:
        return {"learner: gradients": 4 * num_weights, "learner: AdamW": 8 * num_weights}
    shapes = adapter_shapes(lora, spec)
    num_trained = sum(math.prod(a) + math.prod(b) for a, b in shapes.values())
    dense = [math.prod(b[:-1]) * a[-1] for a, b in shapes.values()]
    saved = (12 * num_weights - 16 * num_trained - 2 * sum(dense) - 4 * max(dense)) / 2**20
    return {
        "learner: copy of the base": 2 * sum(dense),
        "learner: adapters": 4 * num_trained,
        "learner: gradients of adapters, one dense at a time": 4 * num_trained + 4 * max(dense),
        f"learner: AdamW of adapters (all that is trained: {saved:.1f} MiB less than all weights)": 8 * num_trained,
    }


def _operand_bytes(spec: ModelSpec, plan: Plan, side: str, width: int, *, kept: bool) -> dict[str, int]:
    """Decoded weights of a side: all of them, or the largest one, while a matmul reads it.

    Where none is kept, tensors without a quantizer are read as they are held, unless they are to become FP32.
    """
    shapes = tensor_shapes(spec)
    role = "sampler_weight" if side == "sampler" else "weight"
    sizes = {key: width * len(names) * math.prod(shapes[names[0]]) for key, names in stacks(spec).items()}
    whole = sum(sizes.values())
    if kept:
        return {f"{side}: operands of matmuls": whole}
    made = [sizes[key] for key, names in stacks(spec).items() if width > 2 or getattr(plan[names[0]], role)]
    largest = max(made, default=0)
    return {f"{side}: one operand at a time (saves {(whole - largest) / 2**20:.1f} MiB)": largest}


def published_bytes(spec: ModelSpec, plan: Plan, role: str) -> int:
    """Bytes of codes, scales and BF16 tensors of one version."""
    total = 0.0
    for name, shape in tensor_shapes(spec).items():
        quantizer = getattr(plan[name], role)
        bits = 16.0 if quantizer is None else QUANTIZERS[quantizer].bits_per_element
        total += math.prod(shape) * bits / 8
    return math.ceil(total)
