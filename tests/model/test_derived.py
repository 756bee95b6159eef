"""Bytes of many tensors are compared together, and whoever differs is named."""

from __future__ import annotations

import pytest
import torch

from onegrid.errors import SyncError
from onegrid.model.derived import unequal
from onegrid.model.live import LiveWeights
from onegrid.ops.operand import Operand
from onegrid.study.bench import engine


def test_bytes_decide_and_not_numbers(device):
    x = torch.tensor([float("nan"), 0.0, 1.0, 2.0, 3.0], device=device)
    zero = x.clone()
    zero[1] = -0.0
    pairs = [
        ("nan", [(x, x.clone())]),
        ("minus zero", [(x, x.clone()), (x, zero)]),
        ("offset", [(torch.cat([x, x])[5:], x)]),  # not at a multiple of 8 bytes on one side
        ("offset, other", [(torch.cat([x, zero])[5:], x)]),
        ("shape", [(x, x[:1])]),
        ("dtype", [(x, x.view(torch.int32))]),
        ("strides", [(x.view(5, 1).expand(5, 2), x.view(5, 1).repeat(1, 2))]),
        ("empty", [(x[:0], x[:0])]),
        ("nothing", []),
    ]
    assert unequal(iter(pairs)) == ["minus zero", "offset, other", "shape", "dtype"]
    assert unequal([]) == []


@pytest.fixture
def weights(device) -> LiveWeights:
    return engine("tiny-moe", "mxfp8", torch.device(device), slots=1, max_len=8).weights


def test_of_a_stack_the_expert_is_named_whose_operand_is_not_its_codes(weights):
    weights.verify()
    key = next(key for key in weights.keys if len(weights.keys[key]) > 3)
    weights.operands[key].values[3, 0, 0] += 1
    other = next(key for key in weights.keys if key.endswith("o_proj.weight"))
    weights.operands[other].values[0, 0] += 1
    with pytest.raises(SyncError) as error:
        weights.verify()
    assert set(error.value.tensors) == {weights.keys[key][3], other}


def test_a_derivation_that_does_not_repeat_is_an_error_for_every_expert_of_its_stack(weights, monkeypatch):
    key = next(key for key in weights.keys if len(weights.keys[key]) > 3)
    derived, made = weights._derived, []

    def once_otherwise(asked: str) -> Operand | None:
        new = derived(asked)
        if asked == key and not made and new is not None:
            made.append(new)
            return Operand(new.values + 1, new.kind, new.row, new.block)
        return new

    monkeypatch.setattr(weights, "_derived", once_otherwise)
    with pytest.raises(SyncError) as error:
        weights.verify()
    assert error.value.tensors == weights.keys[key]
