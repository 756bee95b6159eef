"""What the SGLang adapter says to the engine, against the engine's own files. The engine itself did not run here."""

from __future__ import annotations

import ast
import types

import pytest
import torch

from onegrid.errors import CapabilityError, SyncError
from onegrid.model.spec import tensor_shapes
from onegrid.sampler.sglang import (
    SglangConfig,
    SglangSampler,
    SglangStore,
    engine_arguments,
    generate_arguments,
    grouped,
    values_of,
)
from tests.engines.installed import folder_of, take
from tests.sampler.tiny import plan_of, requests_of, snapshot_of


def definitions(file):
    """Class -> method -> parameter names, and field names of annotated classes, of one file of the wheel."""
    tree = ast.parse((folder_of("sglang") / file).read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)}
            found[node.name] = {n: [a.arg for a in (*m.args.args, *m.args.kwonlyargs)] for n, m in methods.items()}
    return found


def field_names():
    """Every annotated field of the argument groups."""
    names = set()
    root = folder_of("sglang") / "srt"
    for file in [root / "server_args.py", *sorted((root / "arg_groups" / "fields").glob("*.py"))]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def test_every_argument_of_the_engine_is_one_of_its_server_arguments():
    config = SglangConfig(attention="fa3")
    assert engine_arguments(config, "folder", max_len=64, max_slots=8).keys() <= field_names()


def test_every_method_and_argument_the_adapter_uses_is_in_the_engines_public_class():
    engine = definitions("srt/entrypoints/engine.py")["Engine"]
    assert generate_arguments(requests_of(2)).keys() <= set(engine["generate"])
    assert "token_ids_logprob" in engine["generate"]
    assert {"named_tensors", "flush_cache"} <= set(engine["update_weights_from_tensor"])
    assert {"name", "truncate_size"} <= set(engine["get_weights_by_name"])
    used = {"begin_weight_update", "end_weight_update", "flush_cache", "shutdown"}
    assert used | {"release_memory_occupation", "resume_memory_occupation"} <= engine.keys()


def test_every_sampling_parameter_is_one_of_the_engines():
    parameters = definitions("srt/sampling/sampling_params.py")["SamplingParams"]
    tree = ast.parse((folder_of("sglang") / "srt/sampling/sampling_params.py").read_text())
    names = {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    names |= set(parameters.get("__init__", []))
    assert generate_arguments(requests_of(1))["sampling_params"][0].keys() <= names


def test_the_engines_own_loader_puts_every_tensor_of_a_version_at_its_place_whole():
    spec, plan = plan_of("dense", "mxfp8")
    snapshot = snapshot_of(spec, plan, 1, version=1)
    loader = take(
        "sglang",
        "srt/models/qwen3.py",
        "Qwen3ForCausalLM.load_weights",
        get_layer_id=lambda name: int(name.split(".")[2]) if ".layers." in name else None,
        add_prefix=lambda name, prefix: f"{prefix}.{name}",
        maybe_remap_kv_scale_name=lambda name, params: name,
        default_weight_loader=lambda parameter, tensor: parameter.copy_(tensor),
        logger=types.SimpleNamespace(warning=lambda *a: pytest.fail(f"skipped: {a}"), info=lambda *a: None),
    )
    model = FusedModel(spec)
    for group in grouped(snapshot.tensors, 20_000):
        loader.load_weights(model, group)
    for name, canonical in snapshot.tensors.items():
        assert torch.equal(model.read(name), values_of(canonical)), name


class FusedModel:
    """Parameters named and fused as the loader expects them, filled with NaN; shards are written by rows."""

    def __init__(self, spec):
        self.spec, self.params, self.config = spec, {}, types.SimpleNamespace(tie_word_embeddings=spec.tied)
        self.pp_group = types.SimpleNamespace(is_last_rank=True)
        self.model = types.SimpleNamespace()
        self.rows = {}
        for name, shape in tensor_shapes(spec).items():
            fused, shard = self.place(name)
            self.rows.setdefault(fused, {})[shard] = (name, shape)
        for fused, shards in self.rows.items():
            shapes = [shape for _, shape in shards.values()]
            total = torch.full((sum(s[0] for s in shapes), *shapes[0][1:]), torch.nan, dtype=torch.bfloat16)
            if list(shards) != [None]:
                total.weight_loader = self.loader(fused)
            self.params[fused] = total

    def place(self, name):
        for fused, pieces in (("qkv_proj", {"q_proj": "q", "k_proj": "k", "v_proj": "v"}),
                              ("gate_up_proj", {"gate_proj": 0, "up_proj": 1})):  # fmt: skip
            for piece, shard in pieces.items():
                if f".{piece}." in name:
                    return name.replace(piece, fused), shard
        return name, None

    def span(self, fused, shard):
        start = 0
        for other, (_, shape) in self.rows[fused].items():
            if other == shard:
                return slice(start, start + shape[0])
            start += shape[0]
        raise AssertionError(f"{fused} has no shard {shard}")

    def loader(self, fused):
        def load(parameter, tensor, shard):
            parameter[self.span(fused, shard)] = tensor

        return load

    def named_parameters(self):
        return self.params.items()

    def read(self, name):
        fused, shard = self.place(name)
        return self.params[fused][self.span(fused, shard)]


class Scripted:
    """Answers of an engine as its files type them, to see that the adapter fails closed. It is no engine."""

    def __init__(self, answer):
        self.answer = answer

    def __getattr__(self, name):
        return lambda *a, **k: self.answer


@pytest.mark.parametrize("answer", [(False, "no"), None, True, "ok", (1, "ok")], ids=repr)
def test_an_answer_that_does_not_say_success_fails_the_update(answer):
    spec, plan = plan_of("dense", "bf16")
    store = SglangStore(spec, plan, Scripted(answer), SglangConfig())
    with pytest.raises(SyncError, match="begin_weight_update"):
        store.derive()


def test_an_engine_that_does_not_tell_its_weights_cannot_be_proved():
    spec, plan = plan_of("dense", "bf16")
    store = SglangStore(spec, plan, Scripted(None), SglangConfig())
    with pytest.raises(CapabilityError, match="cannot be proved"):
        store.verify()
    wrong = Scripted(torch.zeros(1).tolist())
    with pytest.raises(SyncError, match="other values") as caught:
        SglangStore(spec, plan, wrong, SglangConfig()).verify()
    assert caught.value.condition == "C3"


def test_a_plan_with_quantized_inputs_is_refused_with_the_way_out():
    spec, plan = plan_of("dense", "mxfp8")
    with pytest.raises(CapabilityError, match="sampler_activation"):
        SglangSampler(spec, plan, Scripted(None), SglangConfig(), max_len=64)


def test_groups_hold_every_tensor_once_and_keep_their_size():
    spec, plan = plan_of("moe", "mxfp8")
    tensors = snapshot_of(spec, plan, 1, version=1).tensors
    groups = list(grouped(tensors, 10_000))
    assert [name for group in groups for name, _ in group] == list(tensors)
    assert all(sum(x.nbytes for _, x in g) <= 10_000 or len(g) == 1 for g in groups) and len(groups) > 2
