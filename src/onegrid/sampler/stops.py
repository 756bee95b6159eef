"""When a completion ends: stop token ids for all rows at once, stop strings on decoded text, and the cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onegrid.types import Sampling

DecodeText = Callable[[list[int]], str]
"""Token ids to text."""


def hit_stop_token(token_N: Tensor, sampling: Sampling) -> Tensor:
    """bool [N]: the token just drawn is one of sampling.stop_token_ids."""
    stop_K = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=token_N.device)
    return (token_N.unsqueeze(1) == stop_K).any(dim=1)


def hit_stop_string(tokens_NR: Tensor, length_N: Tensor, sampling: Sampling, decode_text: DecodeText) -> Tensor:
    """bool [N]: the text of the response contains a stop string that the token just drawn completed.

    tokens_NR  responses so far, of length_N tokens each (at least 1)
    Only the last 4 tokens per character of the longest stop string, and 8 more, are decoded: a character has at most
    4 bytes and a token at least one byte.
    """
    window = 4 * max(map(len, sampling.stop_strings)) + 8
    rows = zip(tokens_NR.tolist(), length_N.tolist(), strict=True)
    hits = [
        any(stop in decode_text(tokens[max(0, length - window) : length]) for stop in sampling.stop_strings)
        for tokens, length in rows
    ]
    return torch.tensor(hits, dtype=torch.bool, device=tokens_NR.device)


def text_of(tokens: Sequence[int], finish: str, sampling: Sampling, decode_text: DecodeText | None) -> str:
    """Text of a finished response without its stop token and up to its stop string. "" without decode_text.

    The token ids of the rollout keep both: ids and log-probabilities are what was drawn.
    """
    if decode_text is None:
        return ""
    ids = list(tokens)
    if finish == "stop" and ids and ids[-1] in sampling.stop_token_ids:
        ids.pop()
    text = decode_text(ids)
    if finish == "stop":
        cuts = [at for stop in sampling.stop_strings if (at := text.find(stop)) >= 0]
        text = text[: min(cuts)] if cuts else text
    return text
