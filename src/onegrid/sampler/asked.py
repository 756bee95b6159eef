"""What may be asked of a sampler: prompts and settings that no engine can answer are refused by name before it runs."""

from __future__ import annotations

from collections.abc import Sequence

from onegrid.errors import CapabilityError
from onegrid.types import Sampling


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, max_len: int) -> None:
    """Raises CapabilityError for a prompt that is empty, longer than max_len, or outside the vocabulary."""
    for i, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= max_len or not all(0 <= token < vocab_size for token in prompt):
            raise CapabilityError(
                f"prompt {i} of {len(prompts)} has {len(prompt)} tokens; allowed are 1 to {max_len}, each from 0 to "
                f"{vocab_size - 1}"
            )


def check_sampling(sampling: Sampling, who: str) -> None:
    """Raises CapabilityError for settings that no token can be drawn with; `who` asks for them."""
    for name, fine, allowed in (
        ("temperature", sampling.temperature == 0 or 1e-6 <= sampling.temperature <= 1e6, "0, or 1e-6 to 1e6"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0, up to 1"),
        ("top_k", sampling.top_k >= 0, "0 (all) or larger"),
        ("max_new_tokens", sampling.max_new_tokens >= 1, "1 or larger"),
        ("stop_token_ids", all(0 <= i < 1 << 31 for i in sampling.stop_token_ids), "ids from 0 on"),
        ("stop_strings", "" not in sampling.stop_strings, "no empty string"),
    ):
        if not fine:
            raise CapabilityError(f"{who}: {name} is {getattr(sampling, name)}; allowed: {allowed}")
