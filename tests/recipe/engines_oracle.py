"""What engines do with an exclusion list, in as few lines as possible: the judge of `dialects.matchers`.

Written from the rules, not from the code under test: one function for each engine, on names alone, None for a refusal.
"""

from __future__ import annotations

import fnmatch
import re

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def _fused(name, decide):
    """Decide a fused module by its shards: True or False if they agree, None (refused) if not."""
    parent, _, last = name.rpartition(".")
    answers = {decide(f"{parent}.{shard}") for shard in FUSED[last]}
    return answers.pop() if len(answers) == 1 else None


def _is_fused(name):
    return name.rpartition(".")[2] in FUSED


def vllm_fp8(entries, name, is_experts):
    if _is_fused(name):
        return True if name in entries else _fused(name, lambda shard: shard in entries)
    if ".experts" in name or "experts." in name or "_experts" in name:
        return any(name in entry for entry in entries if "experts" in entry)
    return name in entries


def vllm_modelopt(entries, name, is_experts):
    spread = []
    for entry in entries:
        star = entry.endswith("*") and not entry.endswith(".*") and len(entry) > 1
        spread += [entry[:-1], entry[:-1] + ".*"] if star else [entry]
    whole = vllm_fp8(spread, name, is_experts) if spread else False
    if whole is None:
        return None
    return whole or any(e in name for e in spread) or any(fnmatch.fnmatchcase(name, e) for e in spread)


def _runs(entries, name):
    """Whether an entry's components stand next to each other in the name."""
    parts = name.split(".")
    for entry in entries:
        wanted = entry.split(".")
        if any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1)):
            return True
    return False


def _sglang(entries, name):
    if _is_fused(name):
        return _fused(name, lambda shard: _runs(entries, shard))
    return _runs(entries, name) or ("experts" in name and any(name in e for e in entries if "experts" in e))


def sglang_fp8(entries, name, is_experts):
    bare = [e[6:] if e.startswith("model.") else e for e in entries]
    return _sglang(bare + ["model." + e for e in bare], name)


def sglang_modelopt(entries, name, is_experts):
    def glob(entry, text):
        return re.fullmatch("".join(".*" if c == "*" else re.escape(c) for c in entry), text) is not None

    inner = name[15:] if name.startswith("language_model.") else name
    listed = any(glob(e, text) for e in entries for text in [name, inner, *name.split(".")])
    if is_experts:
        return listed
    linear = _sglang(entries, name)
    return None if linear is None else linear or listed


def compressed_tensors(entries, name, is_experts):
    def one(n):
        return any(re.match(e[3:], n) if e.startswith("re:") else n == e for e in entries)

    if is_experts:
        answers = {one(f"{name}.0.{p}_proj") for p in ("gate", "up", "down")}
        return answers.pop() if len(answers) == 1 else None
    return True if one(name) else _fused(name, one) if _is_fused(name) else False


ORACLES = {
    "vllm-fp8": vllm_fp8,
    "vllm-modelopt": vllm_modelopt,
    "sglang-fp8": sglang_fp8,
    "sglang-modelopt": sglang_modelopt,
    "vllm-compressed-tensors": compressed_tensors,
}
