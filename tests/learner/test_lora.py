"""Adapters: one policy with the sampler, the base untouched, gradients those of an explicit adapter."""

from __future__ import annotations

import copy

import pytest
import torch

from onegrid.errors import CheckpointError, ConfigError, NonFiniteError, SyncError, WeightsError
from onegrid.learner.adapter_files import write_adapter
from onegrid.learner.config import LearnerConfig, LoraConfig
from onegrid.learner.learner import Learner
from onegrid.learner.lora import targeted
from onegrid.model.canonical import Snapshot, parts_of
from onegrid.model.live import LiveWeights
from onegrid.rl.loop import snapshot
from onegrid.sampler.engine import Engine, SamplerConfig
from onegrid.sync import push
from tests.bytes import assert_same_bytes
from tests.learner.test_learner import batch_of, weights_of
from tests.sampler.tiny import plan_of, requests_of
from tests.sync.test_learner_pairing import batch_of as batch_of_rollouts

CASES = [("dense", "mxfp8"), ("moe", "mxfp8"), ("dense", "nvfp4_all"), ("moe", "nvfp4_experts"), ("shared", "mxfp8")]


def lora_learner(model: str, preset: str, *, device="cpu", lr=1e-2, dtype=torch.bfloat16, **lora) -> Learner:
    """A learner with adapters of rank 4 on every projection of a tied (dense) or untied (moe) model."""
    spec, plan = plan_of(model, preset)
    weights = {name: t.to(dtype) for name, t in weights_of(model).items()}
    config = LearnerConfig(lr=lr, lora=LoraConfig(**{"rank": 4, "alpha": 8.0, **lora}))
    return Learner(spec, plan, weights, config, device=device)


def dense_learner(model: str, preset: str, **config) -> Learner:
    spec, plan = plan_of(model, preset)
    weights = {name: t.to(torch.bfloat16) for name, t in weights_of(model).items()}
    return Learner(spec, plan, weights, LearnerConfig(lr=1e-2, **config))


def published(learner: Learner) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {p: t.clone() for p, t in parts_of(held).items()} for name, held in learner.canonical().items()}


def assert_same(actual: dict, expected: dict) -> None:
    """The same names with the same bytes."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(actual[name], value)
        else:
            assert_same_bytes(actual[name], value, name)


def stir(learner: Learner, seed: int = 0) -> None:
    """Factors that are not 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in learner.adapters.factors.values():
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
    learner._quantize()


@pytest.mark.parametrize(("model", "preset"), CASES)
def test_an_adapter_with_b_of_zero_gives_the_bytes_of_the_base(model, preset):
    learner, dense = lora_learner(model, preset), dense_learner(model, preset)
    assert_same(published(learner), published(dense))
    assert_same_bytes(learner.log_probs(batch_of(3)), dense.log_probs(batch_of(3)))


def test_the_sign_of_a_zero_in_the_base_stays():
    learner = lora_learner("dense", "bf16")
    key = next(iter(learner.adapters.base))
    learner.adapters.base[key][0, 0] = -0.0
    learner.adapters.merge()
    assert learner.masters[key][0, 0].signbit()


@pytest.mark.parametrize(("model", "preset"), CASES)
def test_log_probs_are_the_same_bits_on_both_sides_after_every_update(model, preset, device):
    learner = lora_learner(model, preset, device=device)
    live = LiveWeights(learner.spec, learner.plan, side="sampler", device=device)
    engine = Engine(live, SamplerConfig(max_slots=5, max_len=64))
    before = published(learner)
    for update in range(3):
        push(snapshot(learner), engine, bucket_bytes=5000)
        batch = batch_of_rollouts(engine.generate(requests_of(6, temperature=1.3)))
        report = learner.forward_backward(batch)
        assert_same_bytes([x.cpu() for x in report.logp], [s.sampler_logp_R.cpu() for s in batch.sequences])
        metrics = learner.step()
        assert learner.version == update + 1 and metrics["sync/adapter_modules"] > 0
    moved = {name for name, parts in published(learner).items() if not _equal(parts, before[name])}
    assert moved == {n for key in learner.adapters.names for n in learner.keys[key]}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[part].view(torch.uint8), other[part].view(torch.uint8)) for part in one)


@pytest.mark.parametrize(("model", "preset"), [("dense", "nvfp4_all"), ("moe", "mxfp8")])
def test_gradients_are_those_of_an_explicit_adapter(model, preset):
    """The gradient of the merged weight from a dense learner, sent back through base + s B A by autograd."""
    learner = lora_learner(model, preset)
    stir(learner)
    dense = Learner(learner.spec, learner.plan, learner.tensors(), LearnerConfig())
    learner.forward_backward(batch_of())
    dense.forward_backward(batch_of())
    for key in learner.adapters.base:
        at = key.removesuffix(".weight")
        a, b = (learner.adapters.factors[f"{at}.{f}"].detach().double().requires_grad_() for f in ("lora_A", "lora_B"))
        (learner.adapters.base[key].double() + 2.0 * (b @ a)).backward(dense.masters[key].grad.double())
        for name, exact in (("lora_A", a), ("lora_B", b)):
            found = learner.adapters.factors[f"{at}.{name}"].grad
            # n products summed in FP32, n <= 96: at most n 2^-24 of the sum of absolute products; micro-batches add few
            bound = 96 * 2.0**-24 * 2.0 * _magnitude(name, a, b, dense.masters[key].grad)
            assert ((found.double() - exact.grad).abs() <= bound).all(), (key, name)
        assert learner.masters[key].grad is None
    frozen = learner.masters.keys() - learner.adapters.base.keys()
    assert all(learner.masters[key].grad is None for key in frozen)


def _magnitude(name: str, a: torch.Tensor, b: torch.Tensor, dw: torch.Tensor) -> torch.Tensor:
    dw = dw.double().abs()
    return b.detach().abs().mT @ dw if name == "lora_A" else dw @ a.detach().abs().mT


def test_only_targeted_tensors_move_and_only_factors_have_moments():
    learner = lora_learner("moe", "mxfp8", targets=("q_proj", "layers.1.mlp.experts.up_proj"))
    before = published(learner)
    for _ in range(2):
        learner.forward_backward(batch_of())
        learner.step()
    moved = {name for name, parts in published(learner).items() if not _equal(parts, before[name])}
    experts = {f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(4)}
    assert moved == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)} | experts
    params = [p for group in learner.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in params} == {id(p) for p in learner.adapters.factors.values()}
    assert sum(p.numel() for p in params) == 2 * 4 * (64 + 64) + 4 * 4 * (64 + 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_case_W8_a_hundred_versions_leave_the_base_as_it_was_and_the_weights_are_one_cast_of_an_fp32_merge(dtype):
    learner = lora_learner("dense", "bf16", dtype=dtype)
    base = {key: t.clone() for key, t in learner.adapters.base.items()}
    live = LiveWeights(learner.spec, learner.plan, side="sampler", device="cpu")
    engine = Engine(live, SamplerConfig(max_slots=2, max_len=32))
    for version in range(100):
        stir(learner, seed=version)
        learner.version = version
        push(snapshot(learner), engine)
    assert_same(learner.adapters.base, base)
    assert_same({k: t.float() for k, t in base.items()}, {k: weights_of("dense")[k].to(dtype).float() for k in base})
    for key, name in ((k, k.removesuffix(".weight")) for k in base):
        a, b = (learner.adapters.factors[f"{name}.{f}"].detach() for f in ("lora_A", "lora_B"))
        assert_same_bytes(live.held[key], (base[key].float() + 2.0 * (b @ a)).to(torch.bfloat16), key)
    for factor in learner.adapters.factors.values():
        factor.detach().zero_()
    learner._quantize()
    assert_same({k: learner.masters[k].detach() for k in base}, {k: t.float() for k, t in base.items()})


def test_case_W8_a_small_delta_is_not_lost_in_the_master():
    learner = lora_learner("dense", "bf16")
    key = next(iter(learner.adapters.base))
    learner.adapters.base[key][0, 0] = 1.0
    with torch.no_grad():
        learner.adapters.factors[f"{key.removesuffix('.weight')}.lora_A"][:, 0] = 0.003 / 8
        learner.adapters.factors[f"{key.removesuffix('.weight')}.lora_B"][0, :] = 1.0
    learner.adapters.merge()
    assert learner.masters[key][0, 0].item() == pytest.approx(1.003, abs=2**-23)


def test_a_failed_synchronization_leaves_the_old_version_and_the_next_one_holds():
    learner = lora_learner("moe", "mxfp8")
    engine = Engine(LiveWeights(learner.spec, learner.plan, side="sampler"), SamplerConfig(max_slots=5, max_len=64))
    push(snapshot(learner), engine)
    want = engine.generate(requests_of(3))
    stir(learner)
    learner.version += 1
    whole = snapshot(learner)
    torn = Snapshot(version=1, plan_digest="another", tensors=whole.tensors)
    with pytest.raises(SyncError):
        push(torn, engine)
    assert_same_bytes([r.logp_R for r in engine.generate(requests_of(3))], [r.logp_R for r in want])
    push(whole, engine)
    assert engine.version == 1


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_state_comes_back_whole_and_goes_on_with_the_same_bytes(model):
    learner, twin = lora_learner(model, "mxfp8"), lora_learner(model, "mxfp8", seed=5)
    for _ in range(2):
        learner.forward_backward(batch_of())
        learner.step()
    state = copy.deepcopy(learner.state_dict())
    assert "masters" not in state
    twin.load_state_dict(state)
    for side in (learner, twin):
        side.forward_backward(batch_of(seed=2))
        side.step()
    assert_same(twin.adapters.tensors(), learner.adapters.tensors())
    assert_same(published(twin), published(learner))


def test_a_state_of_another_kind_rank_or_base_is_refused():
    learner = lora_learner("dense", "mxfp8")
    state = learner.state_dict()
    with pytest.raises(CheckpointError, match=r"made with learner\.lora"):
        dense_learner("dense", "mxfp8").load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"made without learner\.lora"):
        learner.load_state_dict(dense_learner("dense", "mxfp8").state_dict())
    with pytest.raises(CheckpointError, match="another rank"):
        lora_learner("dense", "mxfp8", rank=3).load_state_dict(state)
    with pytest.raises(CheckpointError, match="other base weights"):
        lora_learner("dense", "mxfp8", dtype=torch.float32).load_state_dict(state)


def test_a_gradient_that_is_not_finite_names_the_factor_and_changes_nothing():
    learner = lora_learner("dense", "mxfp8")
    stir(learner)
    before = {name: t.clone() for name, t in learner.adapters.tensors().items()}
    learner.forward_backward(batch_of(2))
    learner.adapters.factors["model.layers.1.mlp.up_proj.lora_B"].grad[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.up_proj\.lora_B: 1 of"):
        learner.step()
    assert learner.version == 0
    assert_same(learner.adapters.tensors(), before)


@pytest.mark.parametrize(
    ("model", "target", "said"),
    [
        ("dense", "q_porj", "did you mean 'q_proj'"),
        ("dense", "layers.7.mlp.up_proj", r"did you mean 'model\.layers\.\d\.mlp\.up_proj'"),
        ("dense", "embed_tokens", "tied to it, so that both would move"),
        ("moe", "embed_tokens", "a table that is looked up"),
        ("dense", "lm_head", "no module is called 'lm_head'"),
        ("dense", "q_norm", "a vector"),
        ("moe", "gate", "PEFT cannot adapt it"),
    ],
)
def test_a_target_that_cannot_be_is_refused_with_the_reason(model, target, said):
    with pytest.raises(ConfigError, match=said):
        targeted([target], plan_of(model, "bf16")[0])


def test_targets_are_ends_of_names_from_a_dot_on():
    spec, _ = plan_of("moe", "bf16")
    assert targeted(["q_proj"], spec) == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    assert targeted(["lm_head"], spec) == ["lm_head.weight"]
    assert len(targeted(["all-linear"], spec)) == 2 * 7
    with pytest.raises(ConfigError):
        targeted(["proj"], spec)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"rank": 0}, "at least 1"), ({"alpha": 0.0}, "alpha"), ({"targets": ()}, "empty"), ({"dropout": 0.1}, "merged")],
)
def test_settings_that_cannot_be_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        LoraConfig(**{"rank": 4, **change})


@pytest.mark.parametrize("init", ["uniform", "gaussian"])
def test_a_is_drawn_from_the_seed_and_the_name_alone(init):
    few = lora_learner("moe", "bf16", init=init, targets=("up_proj",)).adapters.tensors()
    many = lora_learner("moe", "bf16", init=init).adapters.tensors()
    other = lora_learner("moe", "bf16", init=init, seed=1).adapters.tensors()
    assert_same({name: many[name] for name in few}, few)
    drawn = {name: t for name, t in few.items() if name.endswith("lora_A")}
    assert all(not torch.equal(other[name], t) for name, t in drawn.items())
    assert len({tuple(t.flatten().tolist()) for t in drawn.values()}) == len(drawn)
    assert all(not t.any() for name, t in few.items() if name.endswith("lora_B"))


def test_an_adapter_that_does_not_fit_is_refused_by_name(tmp_path):
    learner = lora_learner("dense", "bf16", targets=("q_proj",))
    write_adapter(learner.adapters, "base", tmp_path / "a")
    folder = str(tmp_path / "a")
    with pytest.raises(WeightsError, match=r"r = 4, but learner\.lora\.rank is 3"):
        lora_learner("dense", "bf16", targets=("q_proj",), rank=3, adapter=folder)
    with pytest.raises(WeightsError, match=r"lora_alpha = 8, but learner\.lora\.alpha is 9\.0"):
        lora_learner("dense", "bf16", targets=("q_proj",), alpha=9.0, adapter=folder)
    with pytest.raises(WeightsError, match=r"missing .*k_proj"):
        lora_learner("dense", "bf16", targets=("q_proj", "k_proj"), adapter=folder)
    with pytest.raises(WeightsError, match=r"q_proj\.lora_. of the adapter has shape"):
        lora_learner("moe", "bf16", targets=("q_proj",), adapter=_wide(tmp_path))
    with pytest.raises(WeightsError, match="cannot read"):
        lora_learner("dense", "bf16", adapter=str(tmp_path / "nothing"))
    with pytest.raises(WeightsError, match="is not empty"):
        write_adapter(learner.adapters, "base", tmp_path / "a")


def _wide(tmp_path) -> str:
    from safetensors.torch import load_file, save_file

    learner = lora_learner("moe", "bf16", targets=("q_proj",))
    write_adapter(learner.adapters, "base", tmp_path / "wide")
    path = tmp_path / "wide" / "adapter_model.safetensors"
    save_file({name: torch.cat([t, t], dim=-1) for name, t in load_file(path).items()}, path)
    return str(tmp_path / "wide")
