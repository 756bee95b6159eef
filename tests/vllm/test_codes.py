"""Converted checkpoints that a real vLLM loads by itself: it holds the codes and scales that `formats` gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from onegrid.cli import app
from onegrid.convert.convert import convert
from onegrid.errors import CapabilityError, OnegridError, SyncError
from onegrid.formats import QUANTIZERS, QuantTensor, quantize
from onegrid.guard.audit import audit
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import save_weights
from onegrid.recipe import preset, resolve
from onegrid.sampler.vllm.adapter import VllmSampler
from onegrid.sampler.vllm.config import VllmConfig
from onegrid.sampler.vllm.wire import checkpoint_items
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import requests_of
from tests.vllm.engines import MODELS, content, kernel_reads, numbers, start

pytestmark = pytest.mark.filterwarnings("ignore")

ROADS = {
    "fp8_row": ("fp8_row", "compressed-tensors", {}),
    "mxfp8": ("mxfp8", "modelopt", {"emulate": True}),
    "nvfp4": ("nvfp4_all", "modelopt", {"emulate": True}),
    "mxfp8-ct": ("mxfp8", "compressed-tensors", {"emulate": True}),
}


def source(folder, **change):
    """A BF16 checkpoint whose gate and up, and q, k and v, have different ranges; returns its weights."""
    config = MODELS["untied"] | change
    spec = ModelSpec.from_hf_config(config)
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for i, (name, shape) in enumerate(tensor_shapes(spec).items()):
        noise = torch.randn(shape, generator=generator) * (0.05 * (1 + i % 4))
        weights[name] = (noise + (len(shape) == 1)).bfloat16()
    save_weights(weights, config, folder)
    return weights


@pytest.fixture(scope="module", params=ROADS)
def converted(request, tmp_path_factory):
    """(source weights, folder, running engine, inputs quantized)"""
    name, road, config = ROADS[request.param]
    folder = tmp_path_factory.mktemp("converted")
    weights = source(folder / "bf16")
    convert(folder / "bf16", folder / "low", preset(name), layout=road)
    shared = name == "nvfp4_all"
    running = start("untied", name, inputs=True, checkpoint=folder / "low", road=road, share_qkv_amax=shared, **config)
    yield weights, folder, running, request.param
    running.sampler.close()


def ours(running, weights, name):
    """A weight as `formats` quantizes it, with the amax of its group; itself where the plan keeps it."""
    planned = running.plan[name]
    if planned.sampler_weight is None:
        return weights[name]
    quantizer = QUANTIZERS[planned.sampler_weight]
    amax = None
    if quantizer.span == "tensor":
        group = (
            [t.name for t in running.plan.tensors.values() if planned.amax_group == t.amax_group]
            if planned.amax_group
            else [name]
        )
        amax = torch.stack([weights[n].abs().amax().float() for n in group]).amax()
    return quantize(weights[name], quantizer, amax=amax)


def test_every_linear_holds_the_bytes_that_formats_gives(converted):
    """Cases Q12 to Q14: gate and up share an amax, every scale is there and used in the sense that the layout means."""
    weights, folder, running, _ = converted
    held = content(folder / "low", running.plan)
    for name in running.plan.tensors:
        want = ours(running, weights, name)
        if isinstance(want, QuantTensor):
            assert_same_bytes(held.tensors[name].codes, want.codes)
            assert_same_bytes(held.tensors[name].scales, want.scales)
        read = running.sampler.stored(name)
        assert_same_bytes(read.get("codes", read.get("values")), want.codes if isinstance(want, QuantTensor) else want)
    running.sampler.digest(running.plan.tensors)  # twins made of these bytes are what the engine holds


def test_kernels_multiply_by_the_decoded_weights(converted):
    weights, _, running, kind = converted
    for name in (n for n in running.plan.tensors if n.endswith("_proj.weight")):
        want = numbers(ours(running, weights, name)).float()
        got = kernel_reads(running, name).float()
        if kind.startswith("mxfp8"):
            assert torch.equal(got, want), name  # one exact product and zeros
        elif kind == "fp8_row":  # 1.0 is 448 * RN(1/448), and the product is rounded to BF16
            assert bool(((got - want).abs() <= want.abs() * 2**-7).all()), name
        else:  # 1.0 is 6 times a block scale in E4M3, 2^-4 apart at most
            assert bool(((got - want).abs() <= want.abs() * 2**-3.5).all()), name


def test_it_generates_and_takes_updates(converted):
    _, _, running, _ = converted
    assert running.sampler.version == 0
    first = running.sampler.generate(requests_of(6))
    assert all(len(r.tokens_R) for r in first)
    for seed in (4, 5, 4):
        running.push(running.snapshot(seed=seed))
    running.sampler.generate(requests_of(6))


def test_the_audit_tells_what_kernels_do_with_their_inputs(converted):
    """Case R9: the exported rules decide every tensor as the plan does; inputs are another matter."""
    _, _, running, kind = converted
    verdict = audit(running.plan, running.sampler)
    if kind == "fp8_row":
        assert verdict.passed
        return
    quantized = {n for n, t in running.plan.tensors.items() if t.sampler_weight}
    assert set(verdict.tensors) == quantized, "emulation reads MXFP8 inputs in BF16, and NVFP4 inputs with one scale"
    live = running.sampler.describe()
    for name in running.plan.tensors:
        assert live[name].format == (running.plan[name].sampler_weight or "bf16")


def test_case_W6_what_is_sent_is_the_plain_grid(converted):
    _, folder, running, _ = converted
    stored = {key: x for file in (folder / "low").glob("*.safetensors") for key, x in load_file(file).items()}
    loaded = content(folder / "low", running.plan)
    road = running.sampler.config.road
    sent = dict(checkpoint_items(loaded.tensors.items(), running.plan, road, torch.bfloat16))
    assert sent.keys() == stored.keys()
    for key, x in sent.items():
        assert (tuple(x.shape), x.dtype) == (tuple(stored[key].shape), stored[key].dtype), key
        assert_same_bytes(
            x.contiguous().view(-1).view(torch.uint8), stored[key].contiguous().view(-1).view(torch.uint8)
        )


def test_onegrid_audit_starts_the_engine_and_compares(converted):
    _, folder, _, kind = converted
    emulate = [] if kind == "fp8_row" else ["--emulate"]
    words = ["audit", str(folder / "low"), "--recipe", ROADS[kind][0], "--live", "vllm", *emulate]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == (0 if kind == "fp8_row" else 1), ended.output
    assert "vLLM 0.32.0" in ended.output and "hold the checkpoint's bytes" in ended.output
    assert ("planned inputs" in ended.output) == (kind != "fp8_row")


@pytest.mark.parametrize("spoil", ["scale", "byte"])
def test_a_checkpoint_that_is_not_the_version_it_claims_to_be_does_not_serve(tmp_path, spoil):
    source(tmp_path / "bf16")
    convert(tmp_path / "bf16", tmp_path / "low", preset("fp8_row"), layout="compressed-tensors")
    spec = ModelSpec.from_hf_config(MODELS["untied"])
    plan = resolve(preset("fp8_row"), MODELS["untied"], tensor_shapes(spec))
    right = content(tmp_path / "low", plan)
    file = next((tmp_path / "low").glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj"
    if spoil == "scale":
        tensors[f"{name}.weight_scale"][7] *= 2
    else:
        tensors[f"{name}.weight"].view(torch.uint8)[5, 5] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SyncError) as found:
        VllmSampler(
            spec,
            MODELS["untied"],
            plan,
            VllmConfig(road="compressed-tensors", kv_cache_bytes=1 << 25),
            max_len=64,
            max_slots=4,
            checkpoint=tmp_path / "low",
            loaded=right,
        )
    assert f"{name}.weight" in found.value.tensors


def test_online_codes_are_the_plans_or_there_is_an_error():
    running = start("untied", "fp8_row", inputs=True, road="online")
    try:
        running.push()
        assert audit(running.plan, running.sampler).passed
        running.sampler.generate(requests_of(3))
        module = running.inside.model.model.layers[0].self_attn.o_proj
        module.weight.data.view(torch.uint8)[0, 0] ^= 1
        with pytest.raises(SyncError) as found:
            running.sampler.digest(running.plan.tensors)
        assert found.value.tensors == ("model.layers.0.self_attn.o_proj.weight",)
    finally:
        running.sampler.close()


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_all", "mxfp4", "fp8_block", "fp8_row", "fp8_tensor"])
def test_case_Q15_every_format_runs_decoded_with_edge_blocks(recipe):
    change = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 2}
    running = start("untied", recipe, change=change)
    try:
        snapshot = running.snapshot()
        running.push(snapshot)
        for name, tensor in snapshot.tensors.items():
            if name.endswith("_proj.weight"):
                assert_same_bytes(kernel_reads(running, name).to(torch.bfloat16) + 0.0, numbers(tensor) + 0.0)
        assert audit(running.plan, running.sampler).passed
        running.sampler.generate(requests_of(2))
    finally:
        running.sampler.close()


def test_case_W7_another_kind_of_scale_is_another_plan(moe):
    """FP32 against power-of-two scales: the engine refuses a manifest of the other plan."""
    power, free = (dataclasses.replace(preset("fp8_block"), name=n) for n in ("power", "free"))
    change = {"weight": "fp8_128x128_fp32", "activation": "fp8_1x128_fp32", "gradient": "fp8_1x128_fp32"}
    rules = tuple(dataclasses.replace(r, **change) if r.weight else r for r in free.rules)
    plans = [
        resolve(r, MODELS["moe"], tensor_shapes(moe.spec)) for r in (power, dataclasses.replace(free, rules=rules))
    ]
    assert plans[0].digest != plans[1].digest
    other = moe.snapshot()
    with pytest.raises(SyncError, match="plan") as found:
        moe.push(dataclasses.replace(other, plan_digest=plans[1].digest))
    assert found.value.condition == "C1"


def test_case_Q11_scales_do_not_depend_on_shards():
    with pytest.raises(OnegridError, match="one shard"):
        start("untied", "fp8_tensor", arguments={"tensor_parallel_size": 2})


def test_a_format_that_only_emulation_runs_here_is_refused_with_the_setting_that_runs_it(monkeypatch):
    """As vLLM 0.32 does in a process that has not emulated yet; one that has goes on doing so."""
    import vllm

    def no_kernel(**arguments):
        raise ValueError("Failed to find a kernel that can implement the MXFP8 linear layer. Reasons: \n")

    monkeypatch.setattr(vllm, "LLM", no_kernel)
    with pytest.raises(CapabilityError, match=r"does not start .* sampler\.vllm\.emulate = true, or .*--emulate"):
        start("untied", "mxfp8", road="modelopt")


def test_formats_without_a_kernel_here_are_refused_by_vllms_own_words():
    with pytest.raises(CapabilityError, match="does not start"):
        start("untied", "fp8_block", road="deepseek", inputs=True)
