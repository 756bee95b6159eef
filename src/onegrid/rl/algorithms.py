"""Algorithms by name: which settings make the loop, the advantage and the loss those of a paper.

`algorithm = "dapo"` in a configuration fills in what the file leaves out; whatever the file says itself wins. The
functions behind the settings stand in rl/advantage.py, learner/policy_terms.py, learner/loss.py and rl/dynamic.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from onegrid.errors import ConfigError

ON_POLICY: dict[str, Any] = {"kl_coefficient": 0.0, "entropy_coefficient": 0.0}

ALGORITHMS: dict[str, dict[str, dict[str, Any]]] = {
    # Shao et al., "DeepSeekMath" (2024): z-scores of a group, mean over sequences, KL to the start in the loss
    "grpo": {
        "loop": {"advantage": "grpo"},
        "loss": {
            "policy": "ppo",
            "aggregation": "seq_mean_token_mean",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coefficient": 0.04,
        },
    },
    # Liu et al., "Understanding R1-Zero-Like Training" (2025): no division by std or length; max_len is the cap
    "dr_grpo": {
        "loop": {"advantage": "dr_grpo"},
        "loss": {"policy": "ppo", "aggregation": "dr_grpo", "clip_low": 0.2, "clip_high": 0.2, **ON_POLICY},
    },
    # Yu et al., "DAPO" (2025): clip higher, mean over tokens, redraws of constant groups, cut answers masked
    "dapo": {
        "loop": {"advantage": "grpo", "truncated": "mask"},
        "loss": {"policy": "ppo", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28, **ON_POLICY},
        "dynamic": {"max_rounds": 10},
    },
    # Zheng et al., "Group Sequence Policy Optimization" (2025): the ratio of a sequence
    "gspo": {
        "loop": {"advantage": "grpo"},
        "loss": {
            "policy": "gspo",
            "aggregation": "seq_mean_token_mean",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            **ON_POLICY,
        },
    },
    # MiniMax, "MiniMax-M1" (2025): bounded importance weights; the paper gives no number for its upper bound
    "cispo": {
        "loop": {"advantage": "grpo"},
        "loss": {"policy": "cispo", "aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0, **ON_POLICY},
    },
    # Ahmadian et al., "Back to Basics" (2024): the mean of the others as baseline, whole sequences
    "rloo": {
        "loop": {"advantage": "rloo"},
        "loss": {"policy": "ppo", "aggregation": "dr_grpo", "clip_low": 0.2, "clip_high": 0.2, **ON_POLICY},
    },
}


def with_algorithm(tree: Mapping[str, Any], *, cap: int) -> dict[str, Any]:
    """A configuration's tables with the settings of its `algorithm` where it has none itself; without one, as it is.

    cap  on response tokens where `sampling.max_new_tokens` is not given; the constant divisor of Dr.GRPO
    Raises ConfigError for an unknown name.
    """
    filled = deepcopy(dict(tree))
    name = filled.get("algorithm", "")
    if name == "":
        return filled
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(str(name), ALGORITHMS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"algorithm = {name!r} is not known; {hint}known are {', '.join(ALGORITHMS)}")
    for section, settings in ALGORITHMS[name].items():
        if isinstance(filled.setdefault(section, {}), Mapping):
            filled[section] = settings | dict(filled[section])
    loss: Any = filled["loss"]
    if isinstance(loss, Mapping) and loss["aggregation"] == "dr_grpo":
        filled["loss"].setdefault("max_len", filled.get("sampling", {}).get("max_new_tokens", cap))
    return filled
