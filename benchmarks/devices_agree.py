"""Are codes and scales the same on this GPU and on a CPU, and how often are FP4-by-FP4 sums?

    python benchmarks/devices_agree.py

Every quantizer of the project's own rules on the inputs of its tests (tests/formats/inputs.py), both axes; and the
FP32 sums of NVFP4 and MXFP4 matmuls of ordinary data, K = 4096, before any factor.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from onegrid.errors import FormatError
from onegrid.formats import QUANTIZERS, quantize
from onegrid.ops.linear import dot
from onegrid.ops.operand import operand
from onegrid.ops.pins import pin
from tests.formats import inputs

OWN = list(QUANTIZERS)[:20]


def main() -> None:
    """Prints what differs."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here to compare with this CPU")
    pin("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    compared = different = 0
    for name in OWN:
        for label, x in inputs.named().items():
            for axis in (-1, -2):
                for dtype in (torch.float32, torch.bfloat16):
                    one, other = parts(x.to(dtype), name, axis), parts(x.to(dtype).cuda(), name, axis)
                    compared += 1
                    if one is not None and other is not None and not same(one, other):
                        different += 1
                        print(f"different: {name} of {label}, axis {axis}, {dtype}")
    print(f"codes, scales and amax: {different} of {compared} cases differ")
    for name, act in (("nvfp4", "nvfp4_row"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8")):
        for kind, x in data().items():
            w = torch.randn(512, 4096, generator=torch.Generator().manual_seed(9)).mul_(0.02).bfloat16()
            sums = []
            for device in ("cpu", "cuda"):
                a, b = operand(x.to(device), QUANTIZERS[act]), operand(w.to(device), QUANTIZERS[name])
                sums.append(dot(a.values, b.values).cpu())
            equal = (sums[0].view(torch.int32) == sums[1].view(torch.int32)).double().mean().item()
            print(f"FP32 sums of {name} by {act}, {kind}: {100 * equal:.3f} % equal on CPU and GPU")


def data() -> dict[str, Tensor]:
    """Activations [512, 4096]."""
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(512, 4096, generator=generator)
    outliers = normal.clone()
    outliers[:, ::128] *= 60.0
    return {"normal": normal.bfloat16(), "outlier channels 60 x": outliers.bfloat16()}


def parts(x: Tensor, name: str, axis: int) -> list[Tensor] | None:
    """Bytes of everything that is stored; None where the input has no such axis."""
    try:
        q = quantize(x, QUANTIZERS[name], axis=axis)
    except FormatError:
        return None
    return [t.cpu().contiguous() for t in (q.codes, q.scales, q.amax) if t is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Byte by byte."""
    return all(
        a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


if __name__ == "__main__":
    main()
