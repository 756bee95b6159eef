"""Drawing: the random numbers, the inverse of the distribution, and what truncation keeps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from onegrid.ops.draw import MIX, WEYL, draw, triton_draw, uniform
from onegrid.ops.logprob import log_probs
from onegrid.sampler.draw import inverse_cdf, kept_set, mix, stream, streams, truncates
from onegrid.types import Request, Sampling
from tests.bytes import assert_same_bytes

REQUEST = Request(prompt_index=2, sample=1, prompt_tokens=(1,), seed=5, sampling=Sampling())


def test_case_M1_temperature_and_truncation_come_before_the_log_softmax(device):
    half = log_probs(torch.tensor([[2.0, 0.0]], device=device), 0.5)
    assert float(half[0, 0]) == pytest.approx(-0.018150, abs=5e-7)  # rounding of the stated digits
    logits = torch.tensor([[2.0, 1.0, 0.0]], device=device)
    full = log_probs(logits, 1.0)
    keep = kept_set(full, Sampling(top_k=2))
    assert keep.tolist() == [[True, True, False]]
    kept = log_probs(logits, 1.0, keep)
    assert float(full[0, 0]) == pytest.approx(-0.407606, abs=5e-7)
    assert float(kept[0, 0]) == pytest.approx(-0.313262, abs=5e-7)
    assert math.exp(float(full[0, 0] - kept[0, 0])) == pytest.approx(0.909969, abs=5e-7)
    assert float(kept[0, 2]) == -math.inf


def test_case_M1_top_p_sees_probabilities_at_the_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert float(log_probs(logits, 1.0).exp()[0, 0]) == pytest.approx(0.665, abs=5e-4)
    assert float(log_probs(logits, 0.5).exp()[0, 0]) == pytest.approx(0.867, abs=5e-4)
    sampling = Sampling(top_p=0.8)
    assert kept_set(log_probs(logits, 1.0), sampling).tolist() == [[True, True, False]]
    assert kept_set(log_probs(logits, 0.5), sampling).tolist() == [[True, False, False]]


def test_the_finalizer_is_that_of_splitmix64():
    # first outputs for seed 1234567, published with the reference generator
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_tensors_and_integers_give_the_same_uniform_numbers(device):
    requests = [replace(REQUEST, prompt_index=i, sample=i % 3, seed=-7 + 2**40 * i) for i in range(20)]
    stream_N = streams(requests, device)
    for position in (0, 1, 4096):
        got = uniform(stream_N, torch.full_like(stream_N, position)).tolist()
        step = 0x9E3779B97F4A7C15
        expected = [(mix((stream(r) + (position + 1) * step) % 2**64) >> 11) / 2**53 for r in requests]
        assert got == expected
        assert all(0 <= u < 1 for u in got)


def stream_of(number: float, position: int) -> int:
    """A stream whose uniform number at `position` is this one: the finalizer, backwards. As int64."""
    word = int(number * 2.0**53) << 11
    word ^= word >> 31 ^ word >> 62
    for shift, multiplier in reversed(MIX):
        word = word * pow(multiplier, -1, 2**64) % 2**64
        word ^= word >> shift ^ word >> 2 * shift
    word = (word - (position + 1) * WEYL) % 2**64
    return word - (word >> 63 << 64)


def any_streams(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams of any bits, the top one too, at positions up to 2^31: int64 [6000] each."""
    generator = torch.Generator().manual_seed(5)
    word_N = torch.randint(-(2**63), 2**63 - 1, (6000,), generator=generator)
    position_N = torch.randint(0, 2**31 + 1, (6000,), generator=generator)
    word_N[:4], position_N[:4] = torch.tensor([0, -1, -(2**63), 2**63 - 1]), 2**31
    position_N[4:2000] %= 5000
    return word_N.to(device), position_N.to(device)


def test_uniform_numbers_of_any_stream_are_those_of_integers_and_have_a_way_back():
    word_N, position_N = any_streams(torch.device("cpu"))
    have = uniform(word_N, position_N).tolist()
    for number, word, position in zip(have, word_N.tolist(), position_N.tolist(), strict=True):
        assert number == (mix((word + (position + 1) * WEYL) % 2**64) >> 11) / 2**53
    for number in (0.0, 1 - 2.0**-53, 0.5, *have[:50]):
        words = torch.tensor([stream_of(number, 3)])
        assert uniform(words, torch.full_like(words, 3)).item() == number


def test_uniform_numbers_within_the_kernel_of_the_draw_have_the_bytes_of_the_definition(gpu):
    from tests.ops.numbers_triton import numbers

    word_N, position_N = any_streams(gpu)
    assert_same_bytes(numbers(word_N, position_N), uniform(word_N, position_N))


def test_streams_differ_in_every_coordinate():
    names = [
        stream(replace(REQUEST, prompt_index=prompt, sample=sample, seed=seed))
        for prompt in range(20)
        for sample in range(20)
        for seed in range(-2, 20)
    ]
    assert len(set(names)) == len(names)


def test_uniform_numbers_are_uniform():
    requests = [replace(REQUEST, prompt_index=i // 8, sample=i % 8) for i in range(400)]
    stream_N1 = streams(requests, torch.device("cpu"))[:, None]
    u_NT = uniform(stream_N1, torch.arange(50)[None])
    # 20,000 draws in 20 bins: chi squared with 19 degrees of freedom is below 43.8 except once in 1,000
    counts = torch.histc(u_NT.flatten().float(), bins=20, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8
    assert abs(float(torch.corrcoef(torch.stack([u_NT[:, 0], u_NT[:, 1]]))[0, 1])) < 0.2


def test_a_token_is_the_first_whose_cumulative_sum_exceeds_the_number(device):
    logp = torch.tensor([0.5, 0.0, 0.25, 0.25], device=device).log().expand(6, 4)
    u = torch.tensor([0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2.0**-53], dtype=torch.float64, device=device)
    assert inverse_cdf(logp, u).tolist() == [0, 0, 2, 2, 3, 3]


def test_a_token_of_probability_zero_is_never_drawn(device):
    logp = torch.tensor([0.0, 1.0, 0.0, 0.0], device=device).log().expand(3, 4)
    u = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64, device=device)
    assert inverse_cdf(logp, u).tolist() == [1, 1, 1]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 33, generator=generator).to(device)
    keep = torch.rand(500, 33, generator=generator).to(device) < 0.3
    keep[:, 7] = True
    for value in (0.0, 0.5, 1 - 2.0**-53):
        u = torch.full((500,), value, dtype=torch.float64, device=device)
        token = inverse_cdf(log_probs(logits, 0.7, keep), u)
        assert bool(keep.gather(1, token[:, None]).all())


def test_a_draw_does_not_depend_on_the_other_rows(device):
    generator = torch.Generator().manual_seed(1)
    logp = log_probs(torch.randn(37, 101, generator=generator).to(device), 1.0)
    u = torch.rand(37, dtype=torch.float64, generator=generator).to(device)
    together = inverse_cdf(logp, u)
    assert_same_bytes(torch.cat([inverse_cdf(logp[i : i + 1], u[i : i + 1]) for i in range(37)]), together)
    assert_same_bytes(inverse_cdf(logp.flip(0), u.flip(0)).flip(0), together)


def test_draws_follow_the_distribution():
    logp = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(20000, 4)
    requests = [replace(REQUEST, prompt_index=i) for i in range(20000)]
    u = uniform(streams(requests, torch.device("cpu")), torch.zeros(20000, dtype=torch.int64))
    counts = torch.bincount(inverse_cdf(logp, u), minlength=4)
    expected = 20000 * torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # 3 degrees of freedom, once in 1,000


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), [1]),
        (Sampling(top_k=3), [0, 1, 2]),  # 0, 2 and 3 tie: lower ids first
        (Sampling(top_k=9), [0, 1, 2, 3, 4]),
        (Sampling(top_p=1e-9), [1]),
        (Sampling(top_p=0.39), [1]),
        (Sampling(top_p=0.41), [0, 1]),
        (Sampling(top_p=0.99), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2, top_p=0.6), [1]),  # .4 of .58 is .69
        (Sampling(top_k=2, top_p=0.7), [0, 1]),
    ],
    ids=str,
)
def test_truncation_keeps_the_most_likely(sampling, kept, device):
    logp = torch.tensor([[0.18, 0.4, 0.18, 0.18, 0.06]], device=device).log()
    assert kept_set(logp, sampling)[0].nonzero().squeeze(1).tolist() == kept
    assert truncates(sampling)


def test_greedy_and_full_sampling_truncate_nothing():
    assert not truncates(Sampling())
    assert not truncates(Sampling(temperature=0, top_k=3, top_p=0.5))


@pytest.mark.parametrize("width", [3, 512, 1500, 151_936])
def test_a_draw_by_blocks_is_the_draw(width, device):
    logp_NV = log_probs(torch.randn(40, width, generator=torch.Generator().manual_seed(0)).to(device) * 3, 1.0)
    logp_NV[3, : width - 1] = -math.inf  # all weight on the last id
    logp_NV[4, 1:] = -math.inf
    uniform_N = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    uniform_N[0], uniform_N[1], uniform_N[2] = 0.0, 1 - 2.0**-53, 0.5
    position_N = torch.arange(40, device=device) * 2**26
    stream_N = torch.tensor([stream_of(u, 2**26 * row) for row, u in enumerate(uniform_N.tolist())], device=device)
    ways = [draw] if device.type == "cpu" else [draw, triton_draw]
    # Two orders of FP64 sums differ by 1e-13 at most; none of these 40 thresholds lies that near a boundary.
    want_N = inverse_cdf(logp_NV, uniform_N)
    for way in ways:
        got_N, got_logp_N, finite_N = way(logp_NV, stream_N, position_N)
        assert got_N.tolist() == want_N.tolist()
        assert_same_bytes(got_logp_N, logp_NV.gather(1, want_N[:, None]).squeeze(1))
        assert finite_N.tolist() == [width == 1 or row not in (3, 4) for row in range(40)]
        assert 0 <= int(way(torch.full_like(logp_NV[:1], math.nan), stream_N[:1], position_N[:1])[0]) < width
