"""Memory that runs out in the middle of a step: nothing half-done stays, and the next step has the same bytes."""

from __future__ import annotations

import pytest
import torch

from onegrid.types import Batch
from tests.bytes import assert_same_bytes
from tests.learner.test_learner import batch_of, gradients, learner_of


def out_of_memory(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError("no room for 1 tensor")


def after_a_step(preset: str, batch: Batch) -> list[torch.Tensor]:
    """Masters of a learner to which nothing happened."""
    learner = learner_of("dense", preset, max_tokens=40)
    learner.forward_backward(batch)
    learner.step()
    return [master.detach() for master in learner.masters.values()]


@pytest.mark.parametrize(
    "where", ["token_logp", "policy_loss", "squares_by_group", "make_room", "publish"], ids=lambda name: f"in {name}"
)
@pytest.mark.parametrize("preset", ["bf16", "mxfp8"])
def test_a_step_that_ran_out_of_memory_can_be_taken_again(where, preset, monkeypatch):
    import onegrid.learner.learner as module

    learner, batch = learner_of("dense", preset, max_tokens=40), batch_of()
    before = {key: master.detach().clone() for key, master in learner.masters.items()}
    learner.forward_backward(batch)
    learner.optimizer.zero_grad(set_to_none=True)
    real, calls = getattr(module, where), []

    def second_time(*args: object, **kwargs: object) -> object:
        calls.append(where)
        first = where in ("token_logp", "policy_loss") and len(calls) == 1
        return real(*args, **kwargs) if first else out_of_memory()

    monkeypatch.setattr(module, where, second_time)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        learner.forward_backward(batch)
        learner.step()
    monkeypatch.setattr(module, where, real)
    if where == "publish":  # the update was made; only its codes were not
        assert any("lower sampler.max_slots" in note for note in caught.value.__notes__)
        assert learner.version == 1
        learner.log_probs(batch)
        assert_same_bytes([m.detach() for m in learner.masters.values()], after_a_step(preset, batch))
        return
    assert any("learner.max_tokens (now 40)" in note for note in caught.value.__notes__)
    assert not gradients(learner) and learner.version == 0
    assert_same_bytes([m.detach() for m in learner.masters.values()], list(before.values()))
    learner.forward_backward(batch)
    learner.step()
    assert_same_bytes([m.detach() for m in learner.masters.values()], after_a_step(preset, batch))


@pytest.mark.parametrize("where", ["LiveWeights", "GradWeights"])
def test_a_plan_that_finds_no_room_is_not_half_adopted(where, monkeypatch):
    import onegrid.learner.learner as module

    learner, batch = learner_of("dense", "mxfp8"), batch_of()
    want = learner.log_probs(batch)
    other = learner_of("dense", "bf16")
    with monkeypatch.context() as patch:
        patch.setattr(module, where, out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            learner.adopt(other.plan)
    assert_same_bytes(learner.log_probs(batch), want)
    learner.adopt(other.plan)
    assert_same_bytes(learner.log_probs(batch), other.log_probs(batch))


def test_a_small_share_of_a_gpu_is_left_usable(gpu):
    learner = learner_of("dense", "mxfp8", device=gpu)
    learner.forward_backward(batch_of(3))
    learner.step()
    want = learner.log_probs(batch_of(3))
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            learner.forward_backward(batch_of(3000))
        assert any("learner.max_tokens" in note for note in caught.value.__notes__)
        assert not gradients(learner)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same_bytes(learner.log_probs(batch_of(3)), want)
