"""Equality of tensors as bytes, the only equality that the tests of this project know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def assert_same_bytes(actual: object, expected: object, what: str = "") -> None:
    """Fail unless both hold the same bytes: dtype, shape, signs of zero and NaN payloads included.

    actual, expected  tensors on any device, or equally long sequences of tensors, compared one by one
    what              named in the failure
    """
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        message = _difference(actual, expected)
        assert message is None, f"{what}: {message}" if what else message
        return
    assert isinstance(actual, Sequence) and isinstance(expected, Sequence), (
        f"{what}: cannot compare {type(actual).__name__} with {type(expected).__name__} as bytes"
    )
    assert len(actual) == len(expected), f"{what}: {len(actual)} tensors, expected {len(expected)}"
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bytes(one, other, f"{what}[{i}]")


def _difference(actual: Tensor, expected: Tensor) -> str | None:
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if actual.numel() == 0:
        return None
    bytes_NB, expected_NB = _bytes(actual), _bytes(expected)
    differs_N = (bytes_NB != expected_NB).any(dim=1)
    count = int(differs_N.sum())
    if count == 0:
        return None
    first = int(differs_N.nonzero()[0, 0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), tuple(actual.shape)))
    one, other = (t.detach().cpu().reshape(-1)[first].item() for t in (actual, expected))
    one_hex, other_hex = ("0x" + bytes(reversed(t[first].tolist())).hex() for t in (bytes_NB, expected_NB))
    return (
        f"{count} of {actual.numel()} elements differ; the first at {list(index)}: "
        f"{one_hex} ({one!r}), expected {other_hex} ({other!r}); dtype {actual.dtype}, shape {tuple(actual.shape)}"
    )


def _bytes(x: Tensor) -> Tensor:
    flat_N = x.detach().cpu().contiguous().reshape(-1)
    return flat_N.view(torch.uint8).reshape(flat_N.numel(), x.element_size())
