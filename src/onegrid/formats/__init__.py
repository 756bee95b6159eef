"""What a number is: element casts, block scales, codes, layouts and digests of every format."""

from onegrid.formats.casts import E2M1, E4M3, E5M2, FORMATS, Format
from onegrid.formats.compiled import can_compile, compiled
from onegrid.formats.decode import decode, dequantize, elements, scale_values
from onegrid.formats.digest import digest, digest_rows, digests
from onegrid.formats.flags import count_true
from onegrid.formats.hadamard import hadamard
from onegrid.formats.layouts import pack, swizzle_128x4, unpack, unswizzle_128x4
from onegrid.formats.quantize import Decoded, QuantTensor, Stats, quantize, quantize_decode
from onegrid.formats.survey import format_errors
from onegrid.formats.table import QUANTIZERS, Quantizer

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "FORMATS",
    "QUANTIZERS",
    "Decoded",
    "Format",
    "QuantTensor",
    "Quantizer",
    "Stats",
    "can_compile",
    "compiled",
    "count_true",
    "decode",
    "dequantize",
    "digest",
    "digest_rows",
    "digests",
    "elements",
    "format_errors",
    "hadamard",
    "pack",
    "quantize",
    "quantize_decode",
    "scale_values",
    "swizzle_128x4",
    "unpack",
    "unswizzle_128x4",
]
