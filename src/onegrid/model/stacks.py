"""Which canonical tensors live in one storage: the same projection of all experts of a layer is one stacked tensor.

Everything that crosses a seam uses canonical names; inside, a batched matmul wants [experts, out, in].
"""

from __future__ import annotations

from onegrid.model.spec import ModelSpec, tensor_shapes


def stacks(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Storage key -> canonical names in storage order. A key with several names holds them on a new first axis.

    The key of a single tensor is its name; of experts, the name without the expert's number.
    """
    keys: dict[str, list[str]] = {}
    for name in tensor_shapes(spec):
        keys.setdefault(stack_key(name), []).append(name)
    return {key: tuple(names) for key, names in keys.items()}


def stack_key(name: str) -> str:
    """Without the expert's number: "...mlp.experts.7.up_proj.weight" -> "...mlp.experts.up_proj.weight"."""
    head, found, tail = name.partition(".mlp.experts.")
    return f"{head}.mlp.experts.{tail.partition('.')[2]}" if found else name


def is_stack(key: str) -> bool:
    """True for the key of stacked experts."""
    return ".mlp.experts." in key
