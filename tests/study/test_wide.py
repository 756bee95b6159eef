"""The fault campaign's wide model is served by packed kernels; else what it says of codes would not be about them."""

import pytest

from onegrid.model.live import joinable
from onegrid.model.spec import ModelSpec, tensor_shapes
from onegrid.ops.matmul_choice import SMALLEST
from onegrid.study.pairing import MODELS, WIDE, make_bench


@pytest.mark.parametrize("model", list(MODELS))
def test_its_linears_are_as_large_and_as_wide_as_packed_kernels_ask_for(model):
    spec = ModelSpec.from_hf_config(MODELS[model] | WIDE)
    shapes = tensor_shapes(spec)
    for keys in [*joinable(spec), ("model.layers.0.self_attn.o_proj.weight",)]:
        num_columns, depth = sum(shapes[key][0] for key in keys), shapes[keys[0]][1]
        assert num_columns * depth >= SMALLEST and num_columns % 16 == 0 and depth % 512 == 0, keys


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_all"])
def test_on_a_gpu_they_serve_it(recipe, gpu):
    weights = make_bench("tied", recipe, device="cuda", weights="codes").weights
    for keys in [
        *weights.groups,
        ("model.layers.0.self_attn.o_proj.weight",),
        ("model.layers.1.mlp.down_proj.weight",),
    ]:
        assert weights.packed.of(keys, 16) is not None, keys
