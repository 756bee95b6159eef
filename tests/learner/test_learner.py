"""The learner: no number depends on how sequences are split, padded or ordered, and its state comes back whole."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from onegrid.errors import CapabilityError, CheckpointError, ConfigError, NonFiniteError, WeightsError
from onegrid.formats import QuantTensor
from onegrid.learner.config import LearnerConfig, learning_rate
from onegrid.learner.learner import Learner
from onegrid.learner.loss import LossConfig
from onegrid.mismatch.metrics import compare
from onegrid.model.spec import tensor_shapes
from onegrid.recipe import PRESETS, resolve
from onegrid.types import Batch, Sequence
from tests.bytes import assert_same_bytes
from tests.sampler.tiny import MODELS, plan_of

ALL = [("dense", name) for name in PRESETS if name != "nvfp4_experts"] + [("moe", name) for name in PRESETS]
EXACT = [(model, name) for model, name in ALL if name != "fp8_tensor"]


def weights_of(model: str, seed: int = 0) -> dict[str, torch.Tensor]:
    spec, _ = plan_of(model, "bf16")
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.15 + (len(shape) == 1)
        for name, shape in tensor_shapes(spec).items()
    }


def learner_of(model: str, preset: str, *, device="cpu", backward=None, loss=None, **config) -> Learner:
    spec, plan = plan_of(model, preset)
    if backward is not None:
        plan = resolve(PRESETS[preset], MODELS[model], tensor_shapes(spec), backward=backward)
    return Learner(spec, plan, weights_of(model), LearnerConfig(lr=1e-3, **config), loss=loss, device=device)


def batch_of(count: int = 7, *, seed: int = 1, vocab: int = 40) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for i in range(count):
        prompt, response = (int(torch.randint(1, top, (1,), generator=generator)) for top in (12, 50))
        mask = torch.rand(response, generator=generator) > 0.2
        sequences.append(
            Sequence(
                tokens_T=torch.randint(0, vocab, (prompt + response,), generator=generator),
                num_prompt=prompt,
                sampler_logp_R=torch.full((response,), -3.7),
                version_R=torch.zeros(response, dtype=torch.int64),
                advantage_R=torch.randn(response, generator=generator),
                mask_R=mask,
                group_id=i // 2,
            )
        )
    return Batch(sequences=tuple(sequences))


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    return {key: master.grad.clone() for key, master in learner.masters.items() if master.grad is not None}


@pytest.mark.parametrize(("model", "preset"), EXACT)
def test_log_probs_do_not_depend_on_the_split_or_the_order(model, preset, device):
    batch = batch_of()
    whole = learner_of(model, preset, device=device)
    want = whole.log_probs(batch)
    for max_tokens in (1, 70):
        assert_same_bytes(learner_of(model, preset, device=device, max_tokens=max_tokens).log_probs(batch), want)
    backwards = Batch(sequences=batch.sequences[::-1])
    assert_same_bytes(whole.log_probs(backwards)[::-1], want)
    assert_same_bytes(whole.forward_backward(batch).logp, want)


@pytest.mark.parametrize("backward", ["quantized", "dequantized", "high_precision"])
@pytest.mark.parametrize(
    ("model", "preset"), [("dense", "mxfp8"), ("dense", "fp8_block"), ("dense", "fp8_row"), ("moe", "mxfp8")]
)
def test_loss_metrics_and_gradients_do_not_depend_on_the_split(model, preset, backward):
    batch, out = batch_of(), []
    for max_tokens in (1, 150, 100000):
        learner = learner_of(model, preset, backward=backward, max_tokens=max_tokens)
        report = learner.forward_backward(batch)
        out.append((report.metrics, gradients(learner), report.num_micro_batches))
    assert out[0][2] == len(batch.sequences) and out[2][2] == 1
    for metrics, grads, _ in out[:2]:
        assert metrics == pytest.approx(out[2][0], rel=1e-6)
        for key, grad in grads.items():
            want = out[2][1][key]
            bound = 1e-5
            if backward == "quantized" and (".experts." in key or preset == "fp8_row"):
                # an expert's tokens, and the columns of a row-scaled operand, are blocks that the split draws anew:
                # the plan says so, and what may differ is the error of the quantizer, 2^-4 of a block's largest number
                bound = 2**-4
            assert (grad - want).norm() <= bound * want.norm() + 1e-12, key


def test_what_the_split_may_change_is_said_by_the_plan():
    _, plan = plan_of("moe", "mxfp8")
    assert any("expert" in note for note in plan.notes)
    _, tensorwise = plan_of("dense", "fp8_tensor")
    assert not tensorwise.exact
    assert any("fp8_row" in reason for reason in tensorwise.reasons)


@pytest.mark.parametrize(("model", "preset"), [("dense", "mxfp8"), ("moe", "nvfp4_experts")])
def test_recomputing_activations_changes_no_bit(model, preset):
    batch = batch_of()
    plain, again = learner_of(model, preset), learner_of(model, preset, recompute=True)
    assert_same_bytes(plain.forward_backward(batch).logp, again.forward_backward(batch).logp)
    for key, grad in gradients(plain).items():
        assert_same_bytes(gradients(again)[key], grad, key)


@pytest.mark.parametrize(("model", "preset"), ALL)
def test_the_forward_reads_the_very_codes_that_are_published(model, preset):
    learner, batch = learner_of(model, preset), batch_of(3)
    before = learner.log_probs(batch)
    published = learner.canonical()
    name = "model.layers.1.mlp.experts.3.up_proj.weight" if model == "moe" else "model.layers.1.mlp.up_proj.weight"
    held = published[name]
    raw = held.codes if isinstance(held, QuantTensor) else held.view(torch.uint8)
    raw[0, ::2] ^= 0x44  # the published tensor is a view of what the forward reads
    learner.live.derive()
    masks = [s.mask_R for s in batch.sequences]
    assert compare(learner.log_probs(batch), before, masks)["mismatch/share_equal"] < 1.0


def test_a_version_is_quantized_once_and_all_micro_batches_read_it(monkeypatch):
    import onegrid.learner.learner as module

    calls = []
    real = module.publish
    monkeypatch.setattr(module, "publish", lambda *a, **k: calls.append(k["side"]) or real(*a, **k))
    learner = learner_of("dense", "mxfp8", max_tokens=1)
    batch = batch_of(4)
    learner.forward_backward(batch)
    learner.canonical()
    assert calls == ["learner"]
    learner.step()
    learner.log_probs(batch)
    assert calls == ["learner"] * 2


@pytest.mark.parametrize("padding", [0, 1, 2, 3])
def test_case_M10_a_sequence_keeps_its_log_probs_alone_packed_and_padded(padding):
    from onegrid.learner.packing import attend_packed, pack
    from onegrid.model.decoder import Rows, decode_rows, head_name
    from onegrid.ops.logprob import token_logp
    from onegrid.ops.packed_attention import segments_of

    learner, batch = learner_of("moe", "mxfp8"), batch_of(5)
    want = learner.log_probs(batch)
    for index, sequence in enumerate(batch.sequences):
        assert_same_bytes(learner.log_probs(Batch(sequences=(sequence,))), [want[index]])
        packed = pack([sequence], align=1)
        left = [torch.nn.functional.pad(t, (padding, 3 - padding)) for t in dataclasses.astuple(packed.rows)]
        rows = Rows(tokens_N=left[0], positions_N=left[1], mask_N=left[2])
        segments = segments_of([padding], [packed.segments.longest], len(rows.tokens_N), "cpu")
        learner.forward([sequence], 1.0)  # lays out the rotary table
        hidden = decode_rows(learner.spec, learner.live, rows, attend_packed(segments), rope=learner.rope)
        logp, _ = token_logp(
            hidden[packed.predict_P + padding],
            learner.live.tensor(head_name(learner.spec)),
            packed.target_P,
            temperature=1.0,
        )
        assert_same_bytes(logp, want[index].detach())


def test_case_M13_log_softmax_is_in_fp32():
    from onegrid.ops.logprob import log_probs

    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(0)) * 4
    out = log_probs(logits, 1.0)
    assert out.dtype == torch.float32
    assert (out.double() - torch.log_softmax(logits.double(), -1)).abs().max() < 1e-5


def test_case_P3_state_comes_back_whole_and_the_next_step_is_the_same_bits():
    batch = batch_of()
    straight = learner_of("moe", "mxfp8", warmup_steps=4, weight_decay=0.1)
    for _ in range(3):
        straight.forward_backward(batch)
        straight.step()
    saved = copy.deepcopy(straight.state_dict())
    resumed = learner_of("moe", "mxfp8", warmup_steps=4, weight_decay=0.1)
    resumed.load_state_dict(saved)
    assert resumed.version == straight.version == 3
    reports = [learner.forward_backward(batch) for learner in (straight, resumed)]
    assert_same_bytes(reports[0].logp, reports[1].logp)
    assert straight.step() == resumed.step()
    for name, tensor in straight.tensors().items():
        assert_same_bytes(resumed.tensors()[name], tensor, name)
    for part in saved:
        with pytest.raises(CheckpointError, match=part):
            resumed.load_state_dict({k: v for k, v in saved.items() if k != part})
    with pytest.raises(CheckpointError, match="plan"):
        learner_of("moe", "bf16").load_state_dict(saved)


def test_case_P3_a_lost_or_misshaped_moment_is_an_error_and_absent_ones_are_fine_only_at_the_start():
    fresh = learner_of("dense", "mxfp8").state_dict()
    learner_of("dense", "mxfp8").load_state_dict(fresh)  # no update yet, so no moments
    learner = learner_of("dense", "mxfp8")
    learner.forward_backward(batch_of(2))
    learner.step()
    for spoil in (
        lambda moments: moments.clear(),
        lambda moments: moments.pop(3),
        lambda moments: moments[3].pop("exp_avg_sq"),
        lambda moments: moments[3].update(exp_avg_sq=torch.ones(2)),
    ):
        state = copy.deepcopy(learner.state_dict())
        spoil(state["optimizer"]["state"])
        with pytest.raises(CheckpointError, match=r"the optimizer's exp_avg\w* of model\.\S+ (is missing|has shape)"):
            learner_of("dense", "mxfp8").load_state_dict(state)


def test_case_M6_a_batch_with_everything_masked_changes_nothing():
    learner, batch = learner_of("dense", "mxfp8"), batch_of(3)
    masked = Batch(sequences=tuple(dataclasses.replace(s, mask_R=torch.zeros_like(s.mask_R)) for s in batch.sequences))
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    report = learner.forward_backward(masked)
    assert report.metrics["train/loss"] == 0.0
    metrics = learner.step()
    assert metrics["train/grad_norm"] == 0.0
    for name, tensor in learner.tensors().items():
        assert_same_bytes(tensor, before[name], name)


def test_case_M4_masked_positions_may_hold_anything():
    batch = batch_of(4)

    def junk(value: float) -> Batch:
        out = []
        for s in batch.sequences:
            hidden = ~s.mask_R
            out.append(
                dataclasses.replace(
                    s,
                    sampler_logp_R=s.sampler_logp_R.masked_fill(hidden, value),
                    advantage_R=s.advantage_R.masked_fill(hidden, value),
                )
            )
        return Batch(sequences=tuple(out))

    clean = learner_of("dense", "mxfp8")
    want = clean.forward_backward(batch).metrics
    for value in (float("nan"), float("inf"), -float("inf"), 1e10):
        learner = learner_of("dense", "mxfp8")
        assert learner.forward_backward(junk(value)).metrics == want
        for key, grad in gradients(clean).items():
            assert_same_bytes(gradients(learner)[key], grad, key)


def test_a_backward_mode_that_ran_unasked_is_an_error():
    learner, batch = learner_of("moe", "mxfp8", backward="dequantized"), batch_of(2)
    learner.forward_backward(batch)
    sites = learner.grad_weights.sites
    planned = {key: site for key, site in sites.items() if learner.plan[learner.keys[key][0]].backward}
    assert planned and all(set(site.calls) <= {"dequantized"} for site in planned.values())
    key = "model.layers.1.self_attn.o_proj.weight"
    assert planned[key].calls["dequantized"] == 1
    planned[key].count("high_precision")
    with pytest.raises(CapabilityError, match=rf"{key}: asked for backward 'dequantized', ran"):
        learner.forward_backward(batch)


def test_warm_up_clipping_and_groups_of_layers_are_reported():
    learner, batch = learner_of("dense", "bf16", warmup_steps=4, max_grad_norm=1e-3), batch_of()
    rates = []
    for _ in range(6):
        learner.forward_backward(batch)
        metrics = learner.step()
        rates.append(metrics["train/lr"])
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    groups = {k: v for k, v in metrics.items() if k.startswith("train/grad_norm/")}
    assert {"train/grad_norm/layers.0", "train/grad_norm/layers.1", "train/grad_norm/embed_tokens"} <= groups.keys()
    assert sum(v**2 for v in groups.values()) ** 0.5 == pytest.approx(metrics["train/grad_norm"])


def test_the_rate_warms_up_and_decays_to_zero():
    config = LearnerConfig(lr=1.0, warmup_steps=2, decay_steps=6)
    rates = [learning_rate(config, done) for done in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    with pytest.raises(ConfigError, match=r"decay_steps 2.*warmup_steps 2"):
        LearnerConfig(warmup_steps=2, decay_steps=2)


def test_bad_weights_and_gradients_are_named_and_change_nothing():
    spec, plan = plan_of("dense", "mxfp8")
    weights = weights_of("dense")
    name = "model.layers.1.self_attn.k_proj.weight"
    bad = weights[name].clone()
    bad[2, 3:5] = float("nan")
    with pytest.raises(NonFiniteError, match=rf"{name}.*2 of"):
        Learner(spec, plan, weights | {name: bad}, LearnerConfig())
    with pytest.raises(WeightsError, match=rf"{name} has shape \(3, 3\).*\(32, 64\)"):
        Learner(spec, plan, weights | {name: torch.zeros(3, 3)}, LearnerConfig())
    with pytest.raises(WeightsError, match=r"missing.*k_proj"):
        Learner(spec, plan, {k: v for k, v in weights.items() if k != name}, LearnerConfig())
    learner, batch = learner_of("dense", "mxfp8"), batch_of(2)
    learner.forward_backward(batch)
    before = {k: v.clone() for k, v in learner.tensors().items()}
    learner.masters[name].grad[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match=name):
        learner.step()
    assert learner.version == 0
    for key, tensor in learner.tensors().items():
        assert_same_bytes(tensor, before[key], key)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "dr_grpo"])
def test_case_L1_every_aggregation_is_independent_of_the_split(aggregation):
    loss = LossConfig(aggregation=aggregation, max_len=50 if aggregation == "dr_grpo" else None)
    out = [learner_of("dense", "bf16", loss=loss, max_tokens=m).forward_backward(batch_of()) for m in (1, 100, 10000)]
    for report in out[:2]:
        assert report.metrics == pytest.approx(out[2].metrics, rel=1e-6)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_rows_without_gaps_give_the_gradients_of_aligned_rows(model):
    """On a CPU only column-wise operands are aligned. Sums over all rows (norms, router) may differ in their order."""
    dense, aligned = (learner_of(model, "mxfp8", backward="quantized") for _ in range(2))
    assert dense.dense
    aligned.dense = False
    reports = [learner.forward_backward(batch_of()) for learner in (dense, aligned)]
    assert_same_bytes(reports[0].logp, reports[1].logp)
    ours, theirs = gradients(dense), gradients(aligned)
    for key, gradient in theirs.items():
        if key.endswith("_proj.weight") or "embed" in key or "lm_head" in key:
            assert_same_bytes(ours[key], gradient, key)
        else:
            torch.testing.assert_close(ours[key], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))
