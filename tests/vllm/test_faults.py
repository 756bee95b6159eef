"""Faults put into the real engine: each is caught by the check that should see it, with the tensors by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onegrid.errors import CapabilityError, SyncError
from onegrid.guard.audit import audit
from onegrid.guard.freshness import fresh_sampler
from onegrid.recipe import Rule, preset
from onegrid.recipe.dialects.modules import FUSED, modules_of
from onegrid.sampler.vllm import launch as launching
from onegrid.sampler.vllm import load as loading
from onegrid.sampler.vllm.wire import Quantization, quantization_of
from tests.sampler.tiny import requests_of
from tests.vllm.engines import MODELS, Running, plan_of, start

pytestmark = pytest.mark.filterwarnings("ignore")
EXPERTS = "model.layers.1.mlp.experts"


def caught(running: Running) -> SyncError:
    """What a digest of every tensor says now."""
    with pytest.raises(SyncError) as found:
        running.sampler.digest(running.plan.tensors)
    return found.value


def parameter(running: Running, name: str) -> torch.Tensor:
    """Live storage in this process."""
    return running.inside.model.get_parameter(name).data


def experts_of(running: Running):
    """The module that holds the experts of layer 1."""
    inside = running.inside
    return inside.module(inside.places[f"{EXPERTS}.0.gate_proj.weight"])


def wrong_ignore(monkeypatch, change):
    """Starts engines with another list of exclusions than the plan's."""

    def told(plan, road):
        right = quantization_of(plan, road)
        config = right.checkpoint["quantization_config"]
        key = "ignored_layers" if "ignored_layers" in config else "ignore"
        return Quantization(checkpoint={"quantization_config": config | {key: change(config[key])}})

    monkeypatch.setattr(launching, "quantization_of", told)


def test_F1_and_F2_read_by_the_engines_own_matcher_are_named_by_the_audit(monkeypatch):
    """`mlp.gate`, which is meant for a router, is a substring of `mlp.gate_up_proj`; and nobody lists lm_head."""
    wrong_ignore(monkeypatch, lambda ignore: ["mlp.gate"])
    running = start("untied", "mxfp8", road="modelopt", emulate=True)
    try:
        verdict = audit(running.plan, running.sampler)
        left = [f"model.layers.{i}.mlp.{w}_proj.weight" for i in (0, 1) for w in ("gate", "up")]
        assert verdict.status == "failed" and verdict.condition == "C1"
        assert set(verdict.tensors) == {*left, "lm_head.weight"}
        with pytest.raises(SyncError):
            running.push()
        assert running.sampler.version is None
    finally:
        running.sampler.close()


def test_the_engine_takes_the_written_configuration_by_its_name_and_reads_the_plans_exclusions():
    """vLLM 0.24 refuses a configuration that another method claims for itself unless it has that method in a list."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    plan = plan_of(MODELS["untied"], "mxfp8", inputs=True)
    told = quantization_of(plan, "modelopt").checkpoint["quantization_config"]
    claims = {
        name: get_quantization_config(name).override_quantization_method(told, None, hf_config=None)
        for name in QUANTIZATION_METHODS
    }
    assert set(claims.values()) == {None}
    read = get_quantization_config(told["quant_method"]).from_config(told)
    assert type(read).__name__ == "ModelOptMxFp8Config"
    read.packed_modules_mapping = FUSED
    modules = modules_of(plan)
    assert {m.weight for m in modules} == {None, "mxfp8"}
    assert {m.name for m in modules if read.is_layer_excluded(m.name)} == {m.name for m in modules if m.weight is None}


def test_a_refusal_without_a_text_is_told_by_its_type_and_place(monkeypatch):
    """As vLLM 0.24's: a bare NotImplementedError, for a tied head beside weights in ModelOpt's layout."""
    import vllm

    def tie_weights(**arguments):
        raise NotImplementedError

    monkeypatch.setattr(vllm, "LLM", tie_weights)
    with pytest.raises(CapabilityError, match=r"NotImplementedError: .*tie_weights in .*test_faults.py, line \d+"):
        start("dense", "bf16")


def test_a_tied_llama_takes_codes_in_the_layout_of_compressed_tensors():
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    running = start("dense", "mxfp8", road="compressed-tensors", emulate=True, change=llama)
    try:
        running.push()
        assert audit(running.plan, running.sampler).passed
    finally:
        running.sampler.close()


@pytest.mark.parametrize(
    ("entry", "layers"),
    [
        ("re:model[.]layers[.]1[.].*", {1}),  # case R4: an expression is one
        ("model.layers.1", set()),  # case R1: whole names only, so a short one excludes nothing
        ("re:.*[.]up_proj$", None),  # case R3: one of a fused pair, which the engine refuses
    ],
)
def test_cases_R1_R3_R4_entries_mean_what_the_engine_makes_of_them(monkeypatch, entry, layers):
    wrong_ignore(monkeypatch, lambda ignore: [*ignore, entry])
    if layers is None:
        with pytest.raises(CapabilityError, match=r"quantiz|scheme"):
            start("untied", "fp8_row", road="compressed-tensors", inputs=True)
        return
    running = start("untied", "fp8_row", road="compressed-tensors", inputs=True)
    try:
        verdict = audit(running.plan, running.sampler)
        left = {n for n, t in running.plan.tensors.items() for i in layers if t.sampler_weight and f".layers.{i}." in n}
        assert set(verdict.tensors) == left and (verdict.status == "failed") == bool(layers)
    finally:
        running.sampler.close()


def test_a_stale_derived_tensor_is_caught_by_name(moe, monkeypatch):
    """vLLM 0.32 packs experts for a CPU only when their kernel is made: its own reload leaves them unpacked (F4)."""
    monkeypatch.setattr(loading, "forget_kernels", lambda model: None)
    before = moe.sampler.version
    said = [r.tokens_R.tolist() for r in moe.sampler.generate(requests_of(3))]
    with pytest.raises(SyncError, match="w13_weight") as found:
        moe.push()
    assert found.value.condition == "C3" and all(".experts." in name for name in found.value.tensors)
    assert moe.sampler.version == before and not moe.sampler.intake.serving, "what cannot be put back does not serve"
    with pytest.raises(SyncError, match="synchronize first"):
        moe.sampler.generate(requests_of(1))
    monkeypatch.undo()
    moe.push()
    assert [r.tokens_R.tolist() for r in moe.sampler.generate(requests_of(3))] != said


def test_F5_gate_and_up_that_have_changed_places_are_caught(moe):
    held = experts_of(moe).w13_weight.data
    half = held.shape[1] // 2
    kept = held.clone()
    held[:, :half], held[:, half:] = kept[:, half:], kept[:, :half]
    error = caught(moe)
    assert error.condition == "C3" and {n.split(".")[5] for n in error.tensors} == {"0", "1", "2", "3"}
    held.copy_(kept)
    moe.sampler.digest(moe.plan.tensors)


def test_one_byte_of_one_expert_of_the_last_layer_is_caught(moe):
    raw = experts_of(moe).w2_weight.data[3].view(-1).view(torch.uint8)
    raw[17] ^= 1
    error = caught(moe)
    assert error.tensors == (f"{EXPERTS}.3.down_proj.weight",)
    raw[17] ^= 1
    moe.sampler.digest(moe.plan.tensors)


def test_a_name_that_the_loader_skips_is_caught(dense, monkeypatch):
    """As when a loader does not know a fused name and lets the old weights stand."""
    lost = "model.layers.1.self_attn.v_proj.weight"
    items = loading.checkpoint_items
    monkeypatch.setattr(loading, "checkpoint_items", lambda *a: ((k, x) for k, x in items(*a) if k != lost))
    before, said = dense.sampler.version, [r.logp_R.tolist() for r in dense.sampler.generate(requests_of(3))]
    with pytest.raises(SyncError) as found:
        dense.push()
    assert lost in found.value.tensors and {n.rpartition("_proj")[0][-1] for n in found.value.tensors} <= set("qkv")
    monkeypatch.undo()
    dense.push()
    assert dense.sampler.version > before
    assert [r.logp_R.tolist() for r in dense.sampler.generate(requests_of(3))] != said


def test_an_update_that_reports_success_and_does_nothing_is_caught(dense, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda inside, config: None)
    before = dense.sampler.version
    with pytest.raises(SyncError) as found:
        dense.push()
    assert len(found.value.tensors) >= 14 and found.value.condition == "C3"
    monkeypatch.undo()
    assert dense.sampler.version == before
    dense.push()


def test_a_norm_and_an_embedding_that_were_changed_are_caught(dense):
    for name in ("model.layers.0.post_attention_layernorm.weight", "model.embed_tokens.weight"):
        live = parameter(dense, name)
        kept = live.clone()
        live.view(-1)[3] += 0.5
        assert name in caught(dense).tensors
        live.copy_(kept)
    dense.sampler.digest(dense.plan.tensors)


def test_a_copy_of_the_tied_head_that_was_not_renewed_is_caught(dense):
    head = dense.inside.model.lm_head
    kept = head.cpu_linear
    stale = head.weight.detach().clone() + 1.0
    head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, stale, bias)
    error = caught(dense)
    assert error.tensors == ("model.embed_tokens.weight",) and "tied head" in str(error)
    head.cpu_linear = kept


def test_case_R7_the_tied_head_shares_its_storage_across_updates(dense):
    model = dense.inside.model
    for _ in range(2):
        dense.push()
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert dense.sampler.describe()["model.embed_tokens.weight"].format == "bf16"


def test_a_weight_in_another_storage_is_caught(dense):
    """What a captured graph or a kernel's kept argument would not see (C4)."""
    norm = dense.inside.model.model.norm
    kept = norm.weight
    norm.weight = torch.nn.Parameter(kept.data.clone(), requires_grad=False)
    error = caught(dense)
    assert error.condition == "C4" and error.tensors == ("model.norm.weight",)
    norm.weight = kept


def test_a_buffer_that_is_spoiled_on_reload_is_caught(dense):
    table = dense.inside.model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
    kept = table.clone()
    table[5, 3] = torch.nan
    assert any("cos_sin_cache" in name for name in caught(dense).tensors)
    table.copy_(kept)


def test_a_buffer_that_the_very_first_reload_spoils_is_caught(monkeypatch):
    load = loading.load
    running = start("dense", "bf16", dtype="float32")
    table = running.inside.model.model.layers[0].self_attn.rotary_emb.cos_sin_cache  # vLLM shares it between engines
    kept = table.clone()

    def spoil(inside, config):
        load(inside, config)
        table[5, 3] = 7.0

    monkeypatch.setattr(loading, "load", spoil)
    try:
        with pytest.raises(SyncError, match="cos_sin_cache"):
            running.push()
        assert running.sampler.version is None
    finally:
        table.copy_(kept)
        running.sampler.close()


def test_a_prefix_cache_that_outlives_an_update_is_caught(dense, monkeypatch):
    dense.sampler.cached_versions()
    before = dense.sampler.version
    monkeypatch.setattr(dense.sampler.engine, "reset_prefix_cache", lambda: None)
    dense.push()
    verdict = fresh_sampler(dense.sampler, version=dense.sampler.version, before=before)
    assert verdict.status == "failed" and verdict.condition == "C7" and str([before]) in verdict.found
    monkeypatch.undo()
    dense.push()
    assert fresh_sampler(dense.sampler, version=dense.sampler.version, before=before).passed


def test_a_kernel_that_nobody_knows_does_not_start(monkeypatch):
    from onegrid.sampler.vllm import live

    monkeypatch.setattr(live, "INPUTS", {})
    with pytest.raises(CapabilityError, match="does not know"):
        start("untied", "mxfp8", road="modelopt", emulate=True)
    running = start("untied", "mxfp8", road="modelopt", emulate=True, allow_unknown_kernel=True)
    running.sampler.close()


def test_case_R10_layers_kept_in_BF16_are_the_same_on_both_sides():
    rule = Rule(layers=("first 1",), weight=None, activation=None)
    recipe = dataclasses.replace(preset("mxfp8"), rules=(rule, *preset("mxfp8").rules))
    running = start("untied", recipe, road="modelopt", emulate=True, inputs=True)
    try:
        live = running.sampler.describe()
        formats = {name: entry.format for name, entry in live.items() if ".layers." in name and "_proj" in name}
        assert {f for n, f in formats.items() if ".layers.0." in n} == {"bf16"}
        assert {f for n, f in formats.items() if ".layers.1." in n} == {"mxfp8"}
        assert live["lm_head.weight"].format == "bf16", "case R6: a rule of one's own keeps the safe defaults"
    finally:
        running.sampler.close()
