"""transformers, which can decode FP8 blocks on a CPU, reads our checkpoints to the numbers that the formats give."""

from __future__ import annotations

import pytest
import torch

from onegrid.convert.convert import convert
from onegrid.model.weights import unpack_experts
from onegrid.recipe import preset
from tests.bytes import assert_same_bytes
from tests.convert.checkpoints import bf16_model, expected


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_transformers_decodes_a_converted_checkpoint_to_the_same_bytes(kind, tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    weights = bf16_model(tmp_path / "bf16", kind)
    plan = convert(tmp_path / "bf16", tmp_path / "low", preset("fp8_block"), layout="deepseek").plan
    config = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "low", quantization_config=config, dtype=torch.bfloat16)
    loaded = unpack_experts(model.state_dict())
    assert sum(t.sampler_weight is not None for t in plan.tensors.values()) > 10
    for name in plan.tensors:
        assert_same_bytes(loaded[name], expected(weights, plan, name), name)


def test_transformers_matches_names_as_the_plan_means_them():
    from transformers.quantizers.quantizers_utils import should_convert_module

    from onegrid.recipe import resolve
    from onegrid.recipe.dialects.modules import modules_of
    from tests.recipe.models import deepseek_v3, qwen_moe

    for model in (qwen_moe(12), deepseek_v3()):
        plan = resolve(preset("fp8_block"), *model)
        entries = plan.to("hf")["quantization_config"]["modules_to_not_convert"]
        for module in modules_of(plan):
            for name in (module.name,) if module.kind == "experts" else module.shards:
                assert should_convert_module(name, entries) == (module.weight is not None), name
