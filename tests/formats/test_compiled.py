"""The same bytes from `torch.compile` as eagerly. Compilation is slow, so there are few graphs, about 10 s in all."""

from __future__ import annotations

import pytest
import torch

from onegrid.formats import QUANTIZERS, can_compile, compiled, quantize, quantize_decode
from tests.bytes import assert_same_bytes
from tests.formats import inputs

# Inductor itself still calls what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def _codes(x):
    q = quantize(x, QUANTIZERS["nvfp4_row"])
    return q.codes, q.scales, q.amax, q.factor, q.stats.nonfinite, q.stats.saturated, q.stats.overflow


def _values(x):
    fast = quantize_decode(x, QUANTIZERS["mxfp8"])
    return fast.values, fast.scales


@pytest.mark.parametrize("function", [_codes, _values])
def test_bytes_are_the_same_eagerly_and_compiled(function, device):
    if not can_compile(device.type):
        pytest.skip("needs a compiler")
    x = torch.cat((inputs.special_blocks(), inputs.scale_boundaries()[::4].reshape(-1, 64))).to(device)
    torch.compiler.reset()
    fast = torch.compile(function, fullgraph=True)
    assert_same_bytes(fast(x), function(x))


@pytest.mark.parametrize("name", [name for name, q in QUANTIZERS.items() if q.source.startswith(("Tr", "NV"))])
def test_every_own_format_compiles_to_the_same_bytes_on_a_gpu(name, gpu):
    x = torch.cat((inputs.special_blocks(), inputs.scale_boundaries()[::4].reshape(-1, 64))).to(gpu)

    def everything(x):
        q, fast = quantize(x, QUANTIZERS[name]), quantize_decode(x, QUANTIZERS[name])
        return q.codes, q.scales, fast.values, q.stats.nonfinite, q.stats.saturated, q.stats.overflow

    torch.compiler.reset()
    assert_same_bytes(torch.compile(everything, fullgraph=True)(x), everything(x))


def test_compiling_leaves_subnormals_alone():
    tiny = torch.tensor([1e-40])
    assert (tiny * 0.5).item() > 0, "subnormals are flushed to zero: some library set the processor's mode"


def test_without_a_compiler_the_eager_function_answers_and_says_so_once(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    can_compile.cache_clear()
    x = inputs.ordinary(4, 32)
    try:
        fast = compiled(quantize_decode)
        with pytest.warns(UserWarning, match="same bytes but slower"):
            first = fast(x, QUANTIZERS["mxfp8"])
        assert_same_bytes(fast(x, QUANTIZERS["mxfp8"]).values, first.values)  # a second warning would be an error
    finally:
        can_compile.cache_clear()
