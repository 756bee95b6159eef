"""RunConfig: everything a run depends on, from a TOML file and dotted overrides.

Each section is a frozen dataclass that stands beside the class it configures; this file puts them together and reads
them strictly: an unknown key, a wrong type or a value out of range is a ConfigError that names the dotted key.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from onegrid.errors import CapabilityError, ConfigError
from onegrid.guard.config import GuardConfig
from onegrid.guard.probe import LENGTH as PROBE_LENGTH
from onegrid.learner.config import LearnerConfig
from onegrid.learner.loss import LossConfig
from onegrid.recipe import recipe_from_dict
from onegrid.rl.algorithms import with_algorithm
from onegrid.rl.checkpoint import CheckpointConfig
from onegrid.rl.debug import DebugConfig
from onegrid.rl.dynamic import DynamicConfig
from onegrid.rl.evaluate import EvalConfig
from onegrid.rl.loop_config import LoopConfig
from onegrid.rl.old_policy import CorrectionConfig
from onegrid.rl.problems import TaskConfig
from onegrid.rl.record import RecordConfig
from onegrid.sampler.asked import check_sampling
from onegrid.sampler.engine import SamplerConfig
from onegrid.tracker.config import TrackersConfig
from onegrid.types import Sampling

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model is trained."""

    checkpoint: str
    """Folder with config.json, safetensors and tokenizer.json; relative names start at the configuration file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The whole configuration of `onegrid train`."""

    model: ModelConfig
    algorithm: str = ""
    """Fills in what the file leaves out of loop, loss and dynamic: one of "grpo", "dr_grpo", "dapo", "gspo", "cispo"
    and "rloo"; see rl/algorithms.py. Empty: the defaults below."""
    seed: int = 0
    device: str = "auto"
    """"cpu" or "cuda"; "auto" takes the GPU where there is one. Which GPU is said by CUDA_VISIBLE_DEVICES."""
    recipe: dict[str, Any] = field(default_factory=lambda: {"preset": "mxfp8"})
    """See `onegrid.recipe.recipe_from_dict`."""
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: Sampling = field(default_factory=Sampling)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    dynamic: DynamicConfig = field(default_factory=DynamicConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        recipe_from_dict(self.recipe)
        try:
            check_sampling(self.sampling, "sampling")
        except CapabilityError as error:
            raise ConfigError(str(error)) from error
        if self.sampling.max_new_tokens >= self.sampler.max_len:
            raise ConfigError(
                f"sampling.max_new_tokens is {self.sampling.max_new_tokens}, which leaves no room for a prompt in the "
                f"{self.sampler.max_len} positions of a slot; raise sampler.max_len"
            )
        if self.sampler.max_len < PROBE_LENGTH and "probe" not in self.guard.off:
            raise ConfigError(
                f"sampler.max_len is {self.sampler.max_len}; the probe of every synchronization takes {PROBE_LENGTH}"
            )
        if self.sampling.temperature <= 0:
            raise ConfigError(f"sampling.temperature is {self.sampling.temperature}; training needs samples: above 0")
        if self.loss.kl_coefficient > 0 and self.loop.reference_every != 1:
            raise ConfigError(
                f"loss.kl_coefficient is {self.loss.kl_coefficient}, which needs the reference in every step: "
                f"loop.reference_every must be 1, not {self.loop.reference_every}"
            )


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file and apply overrides such as "learner.lr=1e-4", the last one winning.

    Raises ConfigError for a file that cannot be read, an unknown key (with the nearest one), a type or a range.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows editors put a mark first
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _apply(tree, override, RunConfig)
    return parse(with_algorithm(tree, cap=Sampling().max_new_tokens), RunConfig)


def parse(tree: dict[str, Any], cls: type[T], path: str = "") -> T:
    """Turn nested dictionaries into the dataclass `cls`; `path` is the dotted name of the section, for messages."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in tree:
        if key not in names:
            raise ConfigError(f"unknown key {_dotted(path, key)!r}; {_suggest(_dotted(path, key), names, path)}")
    values = {key: _convert(value, hints[key], _dotted(path, key)) for key, value in tree.items()}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            hint = hints[f.name]
            if dataclasses.is_dataclass(hint):  # its own message names the first key that is missing inside
                values[f.name] = parse({}, typing.cast(type, hint), _dotted(path, f.name))
            else:
                raise ConfigError(f"{_dotted(path, f.name)} is missing; it has no default ({_name(hint)})")
    try:
        return cls(**values)
    except ConfigError as error:
        named = not path or str(error).startswith(f"{path}.")
        raise ConfigError(str(error) if named else f"[{path}] {error}") from error


def to_toml(config: RunConfig) -> str:
    """Every key with its value, so that `load_config` gives the same object back. Keys that are None are left out."""
    return tomli_w.dumps(_tree(config))


def changed_keys(one: RunConfig, other: RunConfig) -> list[str]:
    """Dotted names of the keys in which two configurations differ."""
    flat = [dict(_flat(_tree(config))) for config in (one, other)]
    return [key for key in sorted(flat[0].keys() | flat[1].keys()) if flat[0].get(key) != flat[1].get(key)]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldInfo:
    """One row of the configuration reference."""

    key: str
    type: str
    default: str
    """TOML text; empty where the key has none and must be given."""
    owner: Any
    """The class that has the key, for what it says about it."""


def reference(cls: type = RunConfig, path: str = "") -> Iterator[FieldInfo]:
    """Every key that a configuration can hold, in order."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        key, section = _dotted(path, f.name), _section(hints[f.name])
        if section is not None:
            yield from reference(section, key)
            continue
        default: Any = dataclasses.MISSING
        if f.default is not dataclasses.MISSING:
            default = f.default
        elif f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        shown = "" if default is dataclasses.MISSING else _toml_value(default)
        yield FieldInfo(key=key, type=_name(hints[f.name]), default=shown, owner=cls)


def _flat(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, _dotted(path, key))
        else:
            yield _dotted(path, key), value


def _toml_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml_value(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def _tree(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _tree(v) for name, v in pairs if v is not None}
    if isinstance(value, tuple):
        return [_tree(v) for v in value]
    return value


def _apply(tree: dict[str, Any], override: str, cls: type) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not KEY=VALUE, such as learner.lr=1e-4")
    pieces = key.strip().split(".")
    node: Any = tree
    hint: Any = cls
    for i, piece in enumerate(pieces):
        section = _section(hint)
        if section is not None:
            hints = typing.get_type_hints(section)
            if piece not in hints:
                path = ".".join(pieces[:i])
                raise ConfigError(f"unknown key {key!r}; {_suggest(_dotted(path, piece), list(hints), path)}")
            hint = hints[piece]
        elif i and typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        else:
            raise ConfigError(f"unknown key {key!r}; {'.'.join(pieces[:i])} is a {_name(hint)} and has no keys")
        if i + 1 < len(pieces):
            node = node.setdefault(piece, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{'.'.join(pieces[: i + 1])} must be a section, got {node!r}")
    section = _section(hint)
    if section is not None and text.strip().lower() != "none":
        names = ", ".join(typing.get_type_hints(section))
        raise ConfigError(f"{key!r} is a section; override one of its keys: {names}")
    if text.strip().lower() == "none" and type(None) in typing.get_args(hint):
        node.pop(pieces[-1], None)
    else:
        node[pieces[-1]] = _read_text(text.strip(), hint)


def _read_text(text: str, hint: Any) -> Any:
    """What the shell gives has no quotes: text stays text where text is wanted, and is read as TOML otherwise."""
    origin = typing.get_origin(hint)
    wants_text = hint is str or origin is typing.Literal or (origin is not dict and str in typing.get_args(hint))
    if wants_text and not text.startswith(('"', "'", "[")):
        return text
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _convert(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint` says, or a ConfigError. Only one conversion is made: an integer where a float is."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return value
    if dataclasses.is_dataclass(hint):
        if isinstance(value, dict):
            return parse(value, typing.cast(type, hint), path)
    elif origin is typing.Literal:
        if value in args:
            return value
        near = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
        hint_text = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{path} = {value!r} is not one of {', '.join(map(repr, args))}{hint_text}")
    elif origin in (typing.Union, types.UnionType):
        choices = [a for a in args if a is not type(None)]
        if len(choices) == 1:
            return _convert(value, choices[0], path)
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_convert(v, args[0], f"{path}[{i}]") for i, v in enumerate(value))
    elif origin is dict:
        if isinstance(value, dict):
            return {k: _convert(v, args[1], f"{path}.{k}") for k, v in value.items()}
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{path} must be {_name(hint)}, got {value!r} ({type(value).__name__})")


def _section(hint: Any) -> type | None:
    """The dataclass that a hint means, one that may be left out too; None for a value."""
    choices = typing.get_args(hint) or (hint,)
    sections = [a for a in choices if isinstance(a, type) and dataclasses.is_dataclass(a)]
    return sections[0] if sections and set(choices) <= {sections[0], type(None)} else None


def _name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "a section"
    if origin is typing.Literal:
        return " or ".join(map(repr, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _name(a) for a in args)
    if origin is tuple:
        return f"list of {_name(args[0])}"
    if origin is dict:
        return "a table"
    words = {bool: "true or false", int: "integer", float: "number", str: "text", object: "any value"}
    return words.get(hint, str(hint))


def _dotted(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _suggest(wrong: str, names: Sequence[str], path: str) -> str:
    """The nearest key in the same section, else anywhere, else what the section holds."""
    near = difflib.get_close_matches(wrong.rpartition(".")[2], names, n=1)
    if near:
        return f"did you mean {_dotted(path, near[0])!r}?"
    everywhere = [info.key for info in reference()]
    same_leaf = [key for key in everywhere if key.rpartition(".")[2] == wrong.rpartition(".")[2]]
    near = same_leaf[:1] or difflib.get_close_matches(wrong, everywhere, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known keys here: {', '.join(names)}"
