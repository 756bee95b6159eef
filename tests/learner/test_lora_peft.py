"""Adapters in the files of PEFT: real `peft` opens ours and answers the same, and training goes on from theirs."""

from __future__ import annotations

import json

import pytest
import torch

from onegrid.errors import WeightsError
from onegrid.learner.adapter_files import read_adapter, write_adapter
from onegrid.learner.config import LearnerConfig, LoraConfig
from onegrid.learner.learner import Learner
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.model.weights import load_weights
from onegrid.recipe import preset, resolve
from tests.bytes import assert_same_bytes
from tests.model.tiny import config_of, transformers_model

pytestmark = [
    # peft 0.21 asks transformers 5.24 under an old name
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    # peft looks for its own pattern of stacked experts among modules, where parameters are
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

ATTENTION = ("q_proj", "v_proj", "o_proj")
CASES = [
    ("qwen3", {"tie_word_embeddings": True}, ("all-linear",)),
    ("llama", {}, ("layers.1.mlp.down_proj", "lm_head")),
    ("qwen2", {}, ATTENTION),
    ("qwen3_moe", {"mlp_only_layers": []}, ("all-linear",)),
]


def base_of(family: str, folder, **change):
    """A saved random model, and the model."""
    model = transformers_model(family, **change).eval()
    model.save_pretrained(folder)
    return model


def learner_of(family: str, folder, lora: LoraConfig, **change) -> Learner:
    spec = ModelSpec.from_hf_config(config_of(family, **change))
    plan = resolve(preset("bf16"), config_of(family, **change), tensor_shapes(spec))
    return Learner(spec, plan, load_weights(folder, spec), LearnerConfig(lora=lora))


def stir(learner: Learner) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for factor in learner.adapters.factors.values():
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)
    learner._quantize()


@pytest.mark.parametrize(("family", "change", "targets"), CASES, ids=[family for family, *_ in CASES])
def test_peft_opens_the_adapter_and_merges_it_to_the_same_weights_and_logits(family, change, targets, tmp_path):
    from peft import PeftModel

    model = base_of(family, tmp_path / "base", **change)
    learner = learner_of(family, tmp_path / "base", LoraConfig(rank=3, alpha=6.0, targets=targets), **change)
    stir(learner)
    write_adapter(learner.adapters, str(tmp_path / "base"), tmp_path / "adapter")
    tokens = torch.arange(1, 21)[None]
    with torch.no_grad():
        before = model(tokens).logits
        adapted = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
        branch = adapted(tokens).logits
        merged_model = adapted.merge_and_unload()
        merged = merged_model(tokens).logits
    merged_model.save_pretrained(tmp_path / "merged")
    theirs = load_weights(tmp_path / "merged", learner.spec)
    for name, ours in learner.tensors().items():
        # sums of 3 products and one addition in FP32, in whatever order; experts of PEFT sum over 6, half of them 0
        assert torch.allclose(ours, theirs[name], rtol=0, atol=8 * 2.0**-24), name
    assert (merged - before).abs().max() > 1e-2
    assert torch.allclose(merged, branch, atol=1e-4)


def test_training_goes_on_from_an_adapter_that_peft_saved(tmp_path):
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    model = base_of("qwen3", tmp_path / "base")
    config = PeftConfig(
        r=2, lora_alpha=5, target_modules=list(ATTENTION), task_type="CAUSAL_LM", init_lora_weights=False
    )
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    lora = LoraConfig(rank=2, alpha=5.0, targets=ATTENTION, adapter=str(tmp_path / "adapter"))
    learner = learner_of("qwen3", tmp_path / "base", lora)
    with torch.no_grad():
        merged = dict(adapted.merge_and_unload().named_parameters())
    for name, ours in learner.tensors().items():
        assert torch.allclose(ours, merged[name], rtol=0, atol=8 * 2.0**-24), name
    write_adapter(learner.adapters, "base", tmp_path / "again")
    for name, factor in read_adapter(tmp_path / "again", lora).items():
        assert_same_bytes(factor, learner.adapters.tensors()[name])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"use_rslora": True}, "use_rslora = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"peft_type": "IA3"}, "does not describe a LoRA"),
    ],
)
def test_what_would_mean_another_adapter_is_refused(change, said, tmp_path):
    base_of("qwen3", tmp_path / "base")
    lora = LoraConfig(rank=2, targets=("q_proj",))
    write_adapter(learner_of("qwen3", tmp_path / "base", lora).adapters, "base", tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(WeightsError, match=said):
        read_adapter(tmp_path / "a", lora)
