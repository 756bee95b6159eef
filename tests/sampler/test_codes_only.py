"""A sampler that keeps codes and scales only: every number has the bytes of one that keeps decoded weights too."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from onegrid.cli import app
from onegrid.config import load_config
from onegrid.errors import CapabilityError, ConfigError, SyncError
from onegrid.formats import QUANTIZERS, QuantTensor, Stats, decode, quantize
from onegrid.guard.faults import FAULTS
from onegrid.model import live as live_module
from onegrid.model import packed
from onegrid.model.live import LiveWeights
from onegrid.model.packed import PackedWeights
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.stacks import stack_key, stacks
from onegrid.ops import matmul_choice
from onegrid.ops.linear import matmul
from onegrid.ops.operand import Operand
from onegrid.ops.packed_cuda import Packed
from onegrid.recipe import PRESETS, resolve
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.study import bench
from onegrid.study.campaign import guarded
from onegrid.study.corruptions import run_corruptions
from onegrid.study.estimate import memory_estimate
from onegrid.study.parts import design
from onegrid.sync import push
from tests.bytes import assert_same_bytes
from tests.guard.pair import Pair
from tests.rl.tiny import write_tiny_run
from tests.sampler.test_engine import bytes_of
from tests.sampler.tiny import engine_of, loaded, plan_of, requests_of, snapshot_of

CASES = [("dense", preset) for preset in ("bf16", "mxfp8", "nvfp4_all", "mxfp4", "fp8_block", "fp8_tensor")]
CASES += [
    ("moe", "mxfp8"),
    ("moe", "nvfp4_experts"),
    ("moe", "fp8_block"),
    ("shared", "mxfp8"),
    ("shared", "nvfp4_all"),
]


@pytest.mark.parametrize(("model", "preset"), CASES)
def test_tokens_and_log_probs_have_the_bytes_of_a_sampler_with_operands(model, preset, device):
    requests = requests_of(12)
    found = {}
    for weights in ("decoded", "auto", "codes"):
        engine = engine_of(model, preset, device=device, max_slots=7, weights=weights)
        found[weights] = [*bytes_of(engine.generate(requests)), *engine.probe([(1, 2, 3)])]
        kept = engine.weights.num_bytes()["derived"]
        assert (kept == 0) == (weights == "codes")
        key = "model.layers.0.self_attn.o_proj.weight"
        x = torch.randn(16, engine.weights.held[key].shape[-1], generator=torch.Generator().manual_seed(1))
        found[weights].append(engine.multiply(key, x.to(device, torch.bfloat16)))
    assert_same_bytes(found["codes"], found["decoded"])
    assert_same_bytes(found["auto"], found["decoded"])


@pytest.mark.parametrize(("model", "preset"), [("moe", "mxfp8"), ("moe", "nvfp4_experts"), ("dense", "fp8_block")])
def test_updates_in_place_sleep_and_another_plan_work_as_with_operands(model, preset, device):
    spec, plan = plan_of(model, preset)
    live = LiveWeights(spec, plan, side="sampler", device=device, weights="codes")
    engine = Engine(live, SamplerConfig(max_slots=8, max_len=64, weights="codes"))
    requests, addresses = requests_of(6), None
    for version, seed in enumerate([1, 2, 1]):
        snapshot = snapshot_of(spec, plan, seed, version=version)
        push(snapshot, engine, bucket_bytes=1000, order=version)
        fresh = Engine(loaded(snapshot, spec, plan, device), engine.config, version=version)
        want = bytes_of(fresh.generate(requests))
        assert_same_bytes(bytes_of(engine.generate(requests)), want)
        serving = engine.reads()
        addresses = addresses or serving.proved
        assert serving.read == serving.proved == addresses and set(addresses) == set(live.keys)
        assert engine.intake.digest(live.names()) == engine.intake.digests
    engine.sleep()
    engine.wake()
    push(snapshot_of(spec, plan, 5, version=7), engine)
    engine.abort()
    assert engine.version == 2
    assert_same_bytes(bytes_of(engine.generate(requests)), want)
    _, bf16 = plan_of(model, "bf16")
    engine.adopt(bf16)
    push(snapshot_of(spec, bf16, 3, version=8), engine)
    assert not engine.weights.operands
    fresh = engine_of(model, "bf16", 3, device=device)
    assert_same_bytes([r.logp_R for r in engine.generate(requests)], [r.logp_R for r in fresh.generate(requests)])


def test_what_an_update_put_aside_is_given_back_when_the_new_version_has_served():
    spec, plan = plan_of("dense", "mxfp8")
    for weights in ("codes", "decoded"):
        engine = engine_of("dense", "mxfp8", weights=weights)
        push(snapshot_of(spec, plan, 1, version=1), engine)
        push(snapshot_of(spec, plan, 2, version=2), engine)
        engine.abort()  # still there
        assert engine.version == 1
        push(snapshot_of(spec, plan, 3, version=3), engine)
        engine.generate(requests_of(3))
        assert (engine.intake._staged is None) == (weights == "codes")
        engine.abort()
        assert engine.version == 3


@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4_all", "mxfp4", "fp8_block"])
def test_quantized_tensors_of_qwen3_8b_take_at_most_a_tenth_more_than_the_bits_of_their_format(preset):
    config = bench.SHAPES["qwen3-8b"] | {"num_hidden_layers": 2}
    spec = ModelSpec.from_hf_config(config)
    plan = resolve(PRESETS[preset], config, tensor_shapes(spec))
    live = LiveWeights(spec, plan, side="sampler", device="meta", weights="codes")
    live.derive()
    bits = plain = 0.0
    for name, shape in tensor_shapes(spec).items():
        size, quantizer = torch.Size(shape).numel(), plan[name].sampler_weight
        if quantizer is None:
            plain += 2 * size
        else:
            bits += size * QUANTIZERS[quantizer].bits_per_element
    assert bits > 300e6 * 4  # two layers' seven linears
    held = live.num_bytes(quantized=True)
    assert held["derived"] == 0 and bits / 8 <= held["canonical"] <= 1.1 * bits / 8
    assert live.num_bytes() == {"canonical": held["canonical"] + plain, "derived": 0}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_estimate_counts_one_operand_at_a_time(device, tmp_path):
    toml = write_tiny_run(tmp_path)
    found = {}
    for weights in ("decoded", "codes"):
        made = design(load_config(toml, [f"sampler.weights={weights}"]), tmp_path)
        made = replace(made, config=replace(made.config, device=device))  # nothing is computed
        found[weights] = memory_estimate(made)
    said = next(key for key in found["codes"] if key.startswith("sampler: one operand at a time"))
    saved = found["decoded"]["total"] - found["codes"]["total"]
    assert f"saves {saved / 2**20:.1f} MiB" in said
    shapes, keys = tensor_shapes(made.spec), stacks(made.spec).values()
    sizes = {names[0]: len(names) * math.prod(shapes[names[0]]) for names in keys}  # of experts, all at once
    quantized = [size for name, size in sizes.items() if made.plan[name].sampler_weight]
    largest = 4 * max(sizes.values()) if device == "cpu" else 2 * max(quantized)
    assert found["codes"][said] == largest
    assert found["decoded"]["sampler: operands of matmuls"] == saved + largest


@pytest.mark.parametrize("model", ["moe", "tied"])
def test_every_check_passes_and_none_is_silent_where_no_operand_is_kept(model):
    pair = Pair(model, weights="codes", linears_per_sync=100, probe_every=1)
    for seed in range(2):
        report = pair.sync()
        assert {v.status for v in report.verdicts} == {"passed"}
        (digest,) = (v for v in report.verdicts if v.check == "digest")
        assert "nothing derived of them is kept" in digest.found
        assert "storage" in {v.check for v in report.verdicts}
        pair.update(seed)
    assert not pair.sampler.weights.operands and pair.learner.live.operands


@pytest.mark.parametrize(
    ("name", "check"), [("one_byte_of_one_expert", "digest"), ("graph_with_old_addresses", "storage")]
)
def test_faults_of_codes_and_of_addresses_are_caught_by_name(name, check, tmp_path):
    found = guarded(FAULTS[name], tmp_path, weights="codes")
    assert found["caught_by"] == check and found["named_right"] and found["safe"] and found["changed"]


def test_whatever_is_corrupted_at_random_is_caught_and_named():
    tally = run_corruptions(6, 1, weights="codes")
    assert (tally.alarms, tally.named_right, tally.unsafe, tally.missed) == (6, 6, 0, [])


@pytest.mark.parametrize(
    "name", ["operand_not_rebuilt", "experts_not_repacked", "layout_swaps_gate_and_up", "both_sides_forget"]
)
def test_faults_of_operands_say_that_they_have_no_place(name, tmp_path):
    with pytest.raises(CapabilityError, match="no place for this fault"):
        guarded(FAULTS[name], tmp_path, weights="codes")
    result = CliRunner().invoke(app, ["faults", name, "--weights", "codes"])
    assert result.exit_code == 0 and f"--  {name}" in result.output and "no place" in result.output


def test_the_description_says_what_is_read_and_other_words_are_refused():
    engine = engine_of("moe", "mxfp8", weights="codes")
    live = engine.describe()
    assert live["model.layers.0.mlp.experts.0.up_proj.weight"].kernel == "codes decoded for each matmul"
    assert live["model.norm.weight"].kernel == live["lm_head.weight"].kernel == "read as is"
    with pytest.raises(ConfigError, match="auto, decoded, codes"):
        SamplerConfig(weights="packed")


def by_definition(a: Operand, weight: Packed, row_N: torch.Tensor | None) -> torch.Tensor:
    """What `packed_matmul` promises, for a CPU."""
    zero = torch.zeros(())
    q = QuantTensor(
        weight.codes, weight.scales, zero, None, weight.shape, weight.quantizer, -1, Stats(zero, zero, zero)
    )
    values = decode(q).to(a.values.dtype)
    assert len(values) == weight.shape[0] and len(a.values) in (16, 32, 48, 64)
    return matmul(a, Operand(values, weight.quantizer.matmul, row_N))


@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4_all"])
def test_weights_that_lie_together_for_one_packed_matmul_are_updated_read_and_proved_as_others(preset, monkeypatch):
    choices = tuple(matmul_choice.Choice((0, 0), "", rows, 1.0, 2.0, True, True) for rows in matmul_choice.ROWS)
    monkeypatch.setattr(packed, "SMALLEST", 0)
    monkeypatch.setattr(packed, "covers", lambda quantizer, shape, device: quantizer is not None)
    monkeypatch.setattr(packed, "choose", lambda *names, decoded: choices)
    calls = []
    monkeypatch.setattr(live_module, "packed_matmul", lambda *of: calls.append(of[1].shape) or by_definition(*of))
    spec, plan = plan_of("dense", preset)
    requests = requests_of(12)
    for weights in ("codes", "auto"):
        live = LiveWeights(spec, plan, side="sampler", weights=weights)
        live.packed = PackedWeights(live.held, live.groups, live.activation, live.device, decoded=live.keeps_operands)
        engine = Engine(live, SamplerConfig(max_slots=24, max_len=64))
        for version in range(2):
            push(snapshot_of(spec, plan, version, version=version), engine)
            fresh = engine_of("dense", preset, version, weights="decoded")
            calls.clear()
            assert_same_bytes(
                [r.logp_R for r in engine.generate(requests)], [r.logp_R for r in fresh.generate(requests)]
            )
            assert set(calls) == {(128, 64), (192, 64), (64, 64), (64, 96)}  # q, k, v at once; gate, up; o; down
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
            for name in "qkv":
                key = f"model.layers.1.self_attn.{name}_proj.weight"
                assert_same_bytes(engine.multiply(key, x), fresh.multiply(key, x))
        assert engine.reads().read == engine.reads().proved
        key = "model.layers.1.self_attn.k_proj.weight"
        assert ("packed matmul" in engine.describe()[key].kernel) == (weights == "codes")
        live.held[key] = replace(live.held[key], codes=live.held[key].codes.clone())
        serving = engine.reads()
        assert [k for k in serving.read if serving.read[k] != serving.proved[k]] == [key]
    bytes_held = live.num_bytes(quantized=True)["canonical"]
    assert bytes_held == sum(x.num_bytes for x in live.held.values() if isinstance(x, QuantTensor))


@pytest.mark.parametrize(
    ("preset", "power", "refused"),
    [("mxfp8", 24, True), ("mxfp8", -118, False), ("mxfp4", 24, True), ("mxfp4", -118, True), ("mxfp4", -110, False)],
)
def test_a_scale_that_packed_kernels_do_not_decode_is_refused_by_the_name_of_its_tensor(
    preset, power, refused, monkeypatch
):
    choices = tuple(matmul_choice.Choice((0, 0), "", rows, 1.0, 2.0, True, True) for rows in matmul_choice.ROWS)
    monkeypatch.setattr(packed, "SMALLEST", 0)
    monkeypatch.setattr(packed, "covers", lambda quantizer, shape, device: quantizer is not None)
    monkeypatch.setattr(packed, "choose", lambda *names, decoded: choices)
    monkeypatch.setattr(live_module, "packed_matmul", by_definition)
    spec, plan = plan_of("dense", preset)
    live = LiveWeights(spec, plan, side="sampler", weights="codes")
    live.packed = PackedWeights(live.held, live.groups, live.activation, live.device, decoded=False)
    engine = Engine(live, SamplerConfig(max_slots=24, max_len=64))
    push(snapshot_of(spec, plan, 0, version=0), engine)
    other, key = snapshot_of(spec, plan, 1, version=1), "model.layers.1.self_attn.k_proj.weight"

    def scaled(key):
        numbers = decode(other.tensors[key]).double()
        numbers = numbers.sign() * numbers.abs().clamp(0.01, 0.02) * 2.0**power
        numbers[3] = 0  # blocks of zeros, whose scales are the smallest, are no reason
        return quantize(numbers.float(), QUANTIZERS[preset])

    tensors = {**other.tensors, key: scaled(key)}
    if not refused:
        push(replace(other, tensors=tensors), engine)
        return
    with pytest.raises(SyncError, match=rf"in {key}; 2\^-?\d+ to 2\^\d are covered.*sampler.weights") as error:
        push(replace(other, tensors=tensors), engine)
    assert error.value.tensors == (key,) and engine.version == 0
    live.packed.check()
    other_key = "model.layers.0.mlp.down_proj.weight"  # of another matmul: both are named
    with pytest.raises(SyncError) as error:
        push(replace(other, tensors={**tensors, other_key: scaled(other_key)}), engine)
    assert set(error.value.tensors) == {key, other_key}


@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4_all", "mxfp4"])
def test_packed_kernels_serve_few_rows_without_operands_and_change_no_byte(preset, gpu, monkeypatch):
    monkeypatch.setattr(packed, "SMALLEST", 0)
    monkeypatch.setattr(matmul_choice, "BEYOND_CACHE", 1 << 20)
    shape = bench.SHAPES["tiny"] | {"hidden_size": 512, "head_dim": 64, "intermediate_size": 1024}
    monkeypatch.setitem(bench.SHAPES, "wide", shape)
    rollouts = {}
    for weights in ("codes", "decoded"):
        engine = bench.engine("wide", preset, gpu, slots=96, max_len=48, weights=weights)
        if weights == "codes":
            for keys in (*engine.weights.groups, ("model.layers.0.mlp.down_proj.weight",)):
                for rows in (16, 32, 48, 64):
                    assert engine.weights.packed.of(keys, rows) is not None
            assert all(choice.chosen and choice.same_bytes for choice in engine.weights.packed.choices)
            assert engine.weights.num_bytes()["derived"] == 0
            serving = engine.reads()
            assert serving.read == serving.proved
            key = stack_key("model.layers.1.self_attn.k_proj.weight")
            assert "packed matmul" in engine.describe()[key].kernel
            held = engine.weights.held[key]
            engine.weights.held[key] = replace(held, codes=held.codes.clone())
            moved = engine.reads()
            assert [k for k in moved.read if moved.read[k] != moved.proved[k]] == [key]
            engine.weights.held[key] = held
        rollouts[weights] = [engine.generate(bench.requests(n, prompt=5, new=12, vocab=512)) for n in (3, 37, 90)]
        rollouts[weights] += [engine.multiply(key, torch.ones(16, 512, dtype=torch.bfloat16, device=gpu))]
    for have, want in zip(rollouts["codes"][:3], rollouts["decoded"][:3], strict=True):
        assert_same_bytes(bytes_of(have), bytes_of(want))
    assert_same_bytes(rollouts["codes"][3], rollouts["decoded"][3])


@pytest.mark.parametrize("preset", ["mxfp8", "nvfp4_all"])
def test_a_gpu_holds_the_format_and_little_else(preset, gpu):
    for warm in (True, False):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(gpu)
        engine = bench.engine("qwen3-8b", preset, gpu, slots=16, max_len=64, layers=2, weights="codes")
        if warm:  # kernels and the libraries' workspaces are there from here on
            engine.generate(bench.requests(3, prompt=5, new=4, vocab=512))
            del engine
            gc.collect()
    engine.graphs = None
    cache = sum(x.nbytes for x in (*engine.cache.keys, *engine.cache.values))
    used = torch.cuda.memory_allocated(gpu) - before - cache
    held, quantized = engine.weights.num_bytes(), engine.weights.num_bytes(quantized=True)
    assert held["derived"] == 0
    plain = held["canonical"] - quantized["canonical"]
    bits = {"mxfp8": 8.25, "nvfp4_all": 4.5}[preset]
    elements = sum(x.shape[0] * x.shape[1] for x in engine.weights.held.values() if hasattr(x, "codes"))
    assert used - plain <= 1.1 * elements * bits / 8
