"""What a step notes of its tokens, against a loop over rows in Python."""

from __future__ import annotations

import random

import pytest
import torch

from onegrid.ops.note import ENDED, FINITE, LENGTH, STOPPED, Next, note, triton_note
from onegrid.sampler.graphs import State
from tests.bytes import assert_same_bytes

SLOTS, RESPONSE, VOCABULARY = 80, 5, 60
FIELDS = ("tokens_SR", "logp_SR", "length_S", "prompt_S", "limit_S", "forced_S", "report_4S")


def case(seed: int, device: torch.device) -> tuple[tuple[torch.Tensor, ...], State, torch.Tensor, int]:
    """Arguments of `note`: any state, also such as no engine comes to."""
    some = random.Random(seed)
    num_rows = some.choice((1, 16, 31, 33, 64, 80))

    def numbers(*choices: int, count: int = SLOTS) -> torch.Tensor:
        return torch.tensor([some.choice(choices) for _ in range(count)], dtype=torch.int64, device=device)

    state = State.empty(SLOTS, RESPONSE, 4, device)
    state.tokens_SR[:] = numbers(*range(VOCABULARY), count=SLOTS * RESPONSE).view(SLOTS, RESPONSE)
    state.logp_SR[:] = torch.tensor([some.gauss(-3, 2) for _ in range(SLOTS * RESPONSE)]).view(SLOTS, RESPONSE)
    state.length_S[:] = numbers(*range(RESPONSE + 1))
    state.limit_S[:] = numbers(*range(1, RESPONSE + 1))
    state.prompt_S[:] = numbers(1, 2, 3, 2**31 - RESPONSE, 2**31)
    state.forced_S[:] = numbers(-1, -1, -1, 0, 7, VOCABULARY - 1)
    state.report_4S[:] = numbers(0, 1, count=4 * SLOTS).view(4, SLOTS)
    logp = [some.choice((some.gauss(-3, 2), 0.0, float("-inf"), float("nan"))) for _ in range(num_rows)]
    drawn = (
        numbers(*range(VOCABULARY), count=num_rows),
        torch.tensor(logp, device=device),
        numbers(0, 1, 1, count=num_rows) != 0,
    )
    stops = numbers(*range(VOCABULARY), count=some.choice((0, 1, 2, 16, 17, 40)))
    return drawn, state, stops, some.choice((1, 4, 2**31, 2**31 + 3))


def by_rows(drawn: tuple[torch.Tensor, ...], state: State, stops: torch.Tensor, num_positions: int) -> Next:
    """One row after another."""
    tokens, positions, owned = [], [], []
    for row, (token, logp, finite) in enumerate(zip(*(x.tolist() for x in drawn), strict=True)):
        forced, length = int(state.forced_S[row]), int(state.length_S[row])
        token = forced if forced >= 0 else token
        if state.report_4S[ENDED, row] == 0:
            at = min(length, RESPONSE - 1)
            state.tokens_SR[row, at], state.logp_SR[row, at] = token, logp
            length += 1
            if token in stops.tolist():
                state.report_4S[STOPPED, row] = state.report_4S[ENDED, row] = 1
            if not finite:
                state.report_4S[FINITE, row] = 0
        if length >= int(state.limit_S[row]):
            state.report_4S[ENDED, row] = 1
        state.length_S[row] = state.report_4S[LENGTH, row] = length
        tokens.append(token)
        positions.append(max(0, min(int(state.prompt_S[row]) + length - 1, num_positions - 1)))
        owned.append(int(state.report_4S[ENDED, row]) == 0)
    return Next(torch.tensor(tokens), torch.tensor(positions), torch.tensor(owned))


def assert_notes_as_rows_do(way, seeds: range, device: torch.device) -> None:
    """`way` leaves and gives the bytes of the loop."""
    for seed in seeds:
        (drawn, state, *rest), (same_drawn, other, *same_rest) = (case(seed, device) for _ in range(2))
        have, want = way(drawn, state, *rest), by_rows(same_drawn, other, *same_rest)
        assert_same_bytes([x.cpu() for x in have], list(want), f"seed {seed}")
        for name in FIELDS:
            assert_same_bytes(getattr(state, name), getattr(other, name), f"{name}, seed {seed}")


def test_a_step_notes_what_a_loop_over_rows_would(device):
    for way in [note] if device.type == "cpu" else [note, triton_note]:
        assert_notes_as_rows_do(way, range(40), device)


@pytest.mark.parametrize("full", [False, True])
def test_a_row_that_has_ended_keeps_all_that_it_has(full, device):
    for way in [note] if device.type == "cpu" else [note, triton_note]:
        drawn, state, stops, positions = case(3, device)
        state.report_4S[ENDED] = 1
        state.length_S[:] = RESPONSE if full else 2
        state.report_4S[LENGTH] = state.length_S
        before = {name: getattr(state, name).clone() for name in FIELDS}
        assert not way(drawn, state, stops, positions).owned_N.any()
        for name, value in before.items():
            assert_same_bytes(getattr(state, name), value, name)
