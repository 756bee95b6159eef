"""How engines read an exclusion list: each engine's own rule, restated, so that a list can be judged before it is used.

A matcher answers whether an engine would leave a module unquantized. The rules differ where it hurts: a substring in
one, dotted components in another, whole names only in a third. Sources: vLLM 0.32 (`is_layer_skipped`,
`ModelOptQuantConfigBase.is_layer_excluded`, `should_ignore_layer`), SGLang 0.5.23 (`is_layer_skipped`,
`ModelOptQuantConfig.is_layer_excluded`), transformers 5.24 (`should_convert_module`). tests/engines compares every
one with the engine's function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from onegrid.errors import RecipeError
from onegrid.recipe.dialects.modules import FUSED, Module

Matcher = Callable[[Sequence[str], Module], bool]

MOST_REPEATS = 4
"""Of one expression; published lists have one or two."""
_ALWAYS_PLAIN = ("vision_tower", "vision_model", "vit_large_projector")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def vllm_fp8(entries: Sequence[str], module: Module) -> bool:
    """Whole names only; a fused module by its name or by all its shards; experts by any entry that contains them."""
    if module.name.rsplit(".", 1)[-1] in FUSED:
        return module.name in entries or _all_or_none(module, [shard in entries for shard in _shards(module)])
    if "experts" in module.name:
        return any(module.name in entry for entry in entries if "experts" in entry)
    return module.name in entries


def vllm_modelopt(entries: Sequence[str], module: Module) -> bool:
    """As `vllm_fp8`, or an entry is a **substring** of the name, or a pattern for it. `X*` means `X` and `X.*`."""
    spread = [part for entry in entries for part in _unstarred(entry)]
    if spread and vllm_fp8(spread, module):
        return True
    inner = module.name.removeprefix("language_model.")
    if any(entry in module.name or entry in inner or fnmatchcase(module.name, entry) for entry in spread):
        return True
    return any(word in module.name for word in _ALWAYS_PLAIN)


def _unstarred(entry: str) -> tuple[str, ...]:
    bare = len(entry) > 1 and entry[-1] == "*" and entry[-2] != "."
    return (entry[:-1], f"{entry[:-1]}.*") if bare else (entry,)


def sglang_fp8(entries: Sequence[str], module: Module) -> bool:
    """Dotted components: equal, a parent, or a run of components, with and without a leading `model.`; no wildcards."""
    bare = [entry.removeprefix("model.") for entry in entries]
    return _sglang_path([spelled for entry in bare for spelled in (entry, f"model.{entry}")], module)


def _sglang_path(entries: Sequence[str], module: Module) -> bool:
    def found(name: str) -> bool:
        return any(f".{entry.rstrip('.')}." in f".{name}." for entry in entries)

    if module.name.rsplit(".", 1)[-1] in FUSED:
        return _all_or_none(module, [found(shard) for shard in _shards(module)])
    if "experts" in module.name and any(module.name in entry for entry in entries if "experts" in entry):
        return True
    return found(module.name)


def sglang_modelopt(entries: Sequence[str], module: Module) -> bool:
    """Linears: dotted components, or a pattern with `*` for the name or a component. Experts: the pattern only."""
    if module.kind != "experts" and _sglang_path(entries, module):
        return True
    name = module.name + ("_with_mqa" if module.name.endswith(".fused_qkv_a_proj") else "")  # as it is called there
    inner = name.removeprefix("language_model.")
    last = name.rsplit(".", 1)[-1]
    for entry in entries:
        pattern = _expression(entry.replace(".", r"\.").replace("*", ".*"))
        if any(pattern.fullmatch(text) for text in (name, inner, *inner.split("."))):
            return True
        tail = entry.rsplit(".", 1)[-1]
        if tail in _LATENT and tail in last:
            return True
    return False


def vllm_compressed_tensors(entries: Sequence[str], module: Module) -> bool:
    """Whole names or `re:` expressions that match from the start; all shards; of experts the first one's three."""

    def found(name: str) -> bool:
        return any(matched_from_start(e[3:], name) if e.startswith("re:") else e == name for e in entries)

    if module.kind == "experts":
        first = [shard for shard in module.shards if shard.startswith(f"{module.name}.0.")] or list(module.shards[:3])
        return _all_or_none(module, [found(shard) for shard in first])
    if found(module.name):
        return True
    if module.name.rsplit(".", 1)[-1] in FUSED:
        return _all_or_none(module, [found(shard) for shard in _shards(module)])
    return False


def transformers_fp8(entries: Sequence[str], module: Module) -> bool:
    """An expression that matches from the start up to the end of a component, or any suffix, also a partial one."""

    def found(name: str) -> bool:
        return any(_expression(rf"(?:{e})(?:(?<=\.)|(?=\.|$))").match(name) or name.endswith(e) for e in entries)

    names = (module.name,) if module.kind == "experts" else module.shards
    return _all_or_none(module, [found(name) for name in names])


MATCHERS: dict[str, Matcher] = {
    "vllm-fp8": vllm_fp8,
    "vllm-modelopt": vllm_modelopt,
    "vllm-compressed-tensors": vllm_compressed_tensors,
    "sglang-fp8": sglang_fp8,
    "sglang-modelopt": sglang_modelopt,
    "transformers-fp8": transformers_fp8,
}
"""Engine and method -> its matcher."""

READERS = {
    "fp8": ("vllm-fp8", "sglang-fp8", "transformers-fp8"),
    "mxfp8": ("sglang-fp8",),
    "modelopt": ("vllm-modelopt", "sglang-modelopt"),
    "compressed-tensors": ("vllm-compressed-tensors",),
}
"""Method of a checkpoint's configuration -> the engines that read it."""


def _shards(module: Module) -> list[str]:
    """The names an engine makes up for the shards of a fused module: the fused word replaced, wherever it stands."""
    word = module.name.rsplit(".", 1)[-1]
    return [module.name.replace(word, shard) for shard in FUSED[word]]


def matched_from_start(expression: str, name: str) -> bool:
    """Whether a regular expression matches a name from its start, as `re:` entries do. RecipeError if it is none."""
    return _expression(expression).match(name) is not None


@lru_cache(maxsize=65536)
def _expression(text: str) -> re.Pattern[str]:
    if _explodes(text):
        raise RecipeError(
            f"{text[:200]!r} can take forever to match a name, and so in every engine that reads it: it repeats what "
            f"repeats or branches itself, or repeats more than {MOST_REPEATS} times; write it with fewer"
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise RecipeError(
            f"{text[:200]!r} is no regular expression ({error}); the engine that reads it fails"
        ) from error


def _explodes(text: str) -> bool:
    """Whether matching may go back over a name more than its length to the power of MOST_REPEATS.

    An expression comes from a checkpoint, which need not mean well: `(a|a)*b` tries 2^n ways, `.*.*.*.*.*.*x` n^6.
    """
    plain = re.sub(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]", "x", text)  # neither escapes nor sets hold an operator
    repeats, groups = 0, [False]
    for i, character in enumerate(plain):
        if character == "(":
            groups.append(False)
        elif character == ")" and len(groups) > 1:
            wide = groups.pop()
            groups[-1] |= wide
            if wide and plain[i + 1 : i + 2] in ("*", "+", "{"):
                return True
        elif character in "*+{":
            repeats += 1
            groups[-1] = True
        elif character == "|" or (character == "?" and plain[i - 1 : i] not in ("(", "*", "+", "}")):
            groups[-1] = True
    return repeats > MOST_REPEATS


def _all_or_none(module: Module, found: list[bool]) -> bool:
    if any(found) and not all(found):
        raise RecipeError(f"only some shards of {module.name} are listed; engines refuse that, list all or none")
    return all(found)
