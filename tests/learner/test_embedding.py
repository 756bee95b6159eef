"""Gradients of the embedding and of the head: sums of all tokens, in one order, to the FP32 master."""

from __future__ import annotations

import pytest
import torch

from onegrid.learner.weights import Embedding
from onegrid.ops.logprob import token_logp
from tests.bytes import assert_same_bytes


def filled(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("vocab", [18, 3000])
def test_the_embeddings_gradient_is_the_sum_over_its_tokens_and_the_same_every_time(vocab, device):
    tokens = torch.randint(0, vocab, (6000,), generator=torch.Generator().manual_seed(1)).to(device)
    master = filled(vocab, 128, seed=2, device=device).bfloat16().float().requires_grad_()
    dy = filled(6000, 128, seed=3, device=device).bfloat16()
    expected = torch.zeros(vocab, 128, dtype=torch.float64, device=device)
    expected.index_put_((tokens,), dy.double(), accumulate=True)
    first = None
    for _ in range(20):
        master.grad = None
        out = Embedding.apply(master, master.detach().bfloat16(), tokens)
        out.backward(dy)
        first = master.grad if first is None else first
        assert_same_bytes(master.grad, first)
    assert out.dtype == torch.bfloat16 and torch.equal(out.float(), master.detach()[tokens])
    assert first.dtype == torch.float32
    assert (first.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_heads_gradient_goes_to_the_master_and_is_that_of_the_definition(temperature, entropy, device):
    hidden = filled(50, 64, seed=4, device=device).bfloat16().requires_grad_()
    master = (filled(300, 64, seed=5, device=device) * 0.3).bfloat16().float().requires_grad_()
    tokens = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(6)).to(device)
    weight = filled(50, seed=7, device=device)
    logp, bonus = token_logp(hidden, master.detach(), tokens, temperature=temperature, master_VD=master)
    (logp @ weight + entropy * bonus.sum() if entropy else logp @ weight).backward()

    x, head = hidden.detach().double().requires_grad_(), master.detach().double().requires_grad_()
    full = torch.log_softmax(x @ head.mT / temperature, -1)
    loss = full.gather(1, tokens[:, None])[:, 0] @ weight.double() - entropy * (full.exp() * full).sum()
    loss.backward()
    assert master.grad.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16
    # BF16 gradients of logits on a GPU, and of hidden states everywhere: 2^-9 each, on average less.
    assert (master.grad.double() - head.grad).norm() <= 2.0**-8 * head.grad.norm()
    assert (hidden.grad.double() - x.grad).norm() <= 2.0**-8 * x.grad.norm()


def test_entropy_alone_has_a_gradient(device):
    hidden = filled(5, 16, seed=8, device=device).bfloat16().requires_grad_()
    head = filled(20, 16, seed=9, device=device).bfloat16().float().requires_grad_()
    token_logp(hidden, head, torch.zeros(5, dtype=torch.int64, device=device), temperature=1.0)[1].sum().backward()
    assert hidden.grad.norm() > 0 and head.grad.norm() > 0
