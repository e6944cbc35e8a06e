"""The Triton decoders of other quantizations against the torch ones, bit for bit: every value with
every scale.
"""

import math
import re
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import weights
from integers import Weight, awq, compressed, gptq, torchao

from nf4conv.codec.decode.floats import decode_fp4, decode_scaled
from nf4conv.codec.kernels.ahead import Codec, fp4_decoder, integer_decoder, scaled_decoder
from nf4conv.codec.kernels.decoding.floats import fp4_kernel
from nf4conv.format.integers import IntegerLayout

same_bits = partial(weights.same_bits, any_nan=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# the interpreter truncates where the GPU rounds to nearest
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
VALUES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
SCALES = [*DTYPES, torch.float8_e8m0fnu, torch.uint8]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape))
    )


def random_scale(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns scales of all magnitudes: all bytes, and floats with 0, subnormal and infinite ones
    among them.
    """
    if dtype in (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn):
        return random_bytes(*shape).view(dtype)
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-149, 128, shape, generator=generator)
    scale = (torch.rand(shape, generator=generator) + 1).ldexp(exponents)
    scale.view(-1)[: min(3, scale.numel())] = torch.tensor([0.0, math.inf, math.nan])[
        : scale.numel()
    ]
    return scale.to(dtype)


LAYOUTS = {
    "one": ((40, 96), (1, 1), (1, 1)),
    "rows": ((40, 96), (40, 1), (1, 1)),
    "columns": ((40, 96), (1, 96), (1, 1)),
    "blocks": ((40, 96), (2, 3), (32, 32)),
    "blocks of 32 in a row": ((40, 96), (40, 3), (1, 32)),
    "partial, unaligned blocks": ((37, 1037), (2, 9), (32, 128)),
    "a single column": ((5, 1), (5, 1), (1, 1)),
}


def by_kernel(
    codec: Codec, pointers: Sequence[torch.Tensor], shape: tuple[int, int], *numbers: int
) -> torch.Tensor:
    """Decodes on DEVICE, launched as the engine on the driver does (sources/tensors.py, Kernel)."""
    variant = codec.kernels["decode"]
    rows, columns = shape
    tiles = -(-columns // codec.numbers["columns"])
    out = torch.empty(rows * columns * OUT_OF.get(variant.kernel, 1), dtype=variant.pointers[-1])
    tensors = []
    for tensor, dtype in zip((*pointers, out), variant.pointers, strict=True):
        tensors.append(tensor.contiguous().view(dtype).to(DEVICE))
    grid = (-(-rows // codec.numbers["rows"]) * tiles,)
    arguments = (*tensors, rows, columns, tiles, *numbers, *variant.constants)
    # the engine compiles so: a product and a sum are rounded apart
    variant.kernel[grid](*arguments, num_warps=variant.num_warps, enable_fp_fusion=False)
    return tensors[-1].view(rows, -1)


OUT_OF = {fp4_kernel: 2}
"""Values of each column of a kernel: one of the others."""


def scaled_by_kernel(
    values: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    by_127: bool = False,
) -> torch.Tensor:
    places = zip(scale.shape, scale.stride(), strict=True)
    steps = [0 if size == 1 else step for size, step in places]
    aligned = values.shape[1] % 16 == 0
    codec = scaled_decoder(DEVICE, dtype, values.dtype, scale.dtype, block, by_127, aligned)
    return by_kernel(codec, (values, scale), values.shape, *steps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaled_values_in_every_layout(layout: str, dtype: torch.dtype):
    shape, scale_shape, block = LAYOUTS[layout]
    scale = random_scale(torch.float32, *scale_shape)
    for values_dtype in VALUES if layout == "blocks" else VALUES[:1]:
        values = random_bytes(*shape).view(values_dtype)
        expected = decode_scaled(values, scale, None if block == (1, 1) else block, dtype)
        same_bits(scaled_by_kernel(values, scale, block, dtype), expected)


@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
@pytest.mark.parametrize("values_dtype", VALUES, ids=str)
def test_every_value_with_every_kind_of_scale(values_dtype: torch.dtype, scale_dtype: torch.dtype):
    values = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(values_dtype)
    scale = random_scale(scale_dtype, 256, 1)
    if scale.element_size() == 1:
        scale = torch.arange(256, dtype=torch.uint8).view(scale_dtype).view(256, 1)
    found = scaled_by_kernel(values, scale, (1, 1), torch.float32)
    same_bits(found, decode_scaled(values, scale, None, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bit_rows_of_bitsandbytes(dtype: torch.dtype):
    values, scale = random_bytes(33, 80).view(torch.int8), random_scale(torch.float32, 33)
    found = scaled_by_kernel(values, scale.view(-1, 1), (1, 1), dtype, by_127=True)
    same_bits(found, decode_scaled(values, scale, None, dtype, by_127=True))


@pytest.mark.parametrize("factor", [None, "divisor", "multiplier"])
@pytest.mark.parametrize(
    ("rows", "columns", "group", "scale_dtype", "dtype"),
    [
        (37, 1056, 32, torch.uint8, torch.float32),
        (6, 48, 16, torch.float8_e4m3fn, torch.float16),
        (1, 32, 16, torch.float8_e8m0fnu, DTYPES[-1]),
        (37, 1056, 16, torch.float8_e4m3fn, torch.float32),
    ],
)
def test_fp4(
    rows: int,
    columns: int,
    group: int,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    factor: str | None,
):
    values = random_bytes(rows, columns // 2)
    scale = random_scale(scale_dtype, rows, columns // group)
    factors = {} if factor is None else {factor: torch.tensor([17.3])}
    dtypes = [torch.float32 if name == factor else None for name in ("divisor", "multiplier")]
    aligned = columns % 32 == 0
    codec = fp4_decoder(DEVICE, dtype, scale_dtype, group // 2, *dtypes, aligned, False)
    pointers = (values, scale, factors.get("divisor", scale), factors.get("multiplier", scale))
    found = by_kernel(codec, pointers, values.shape, columns // group)
    same_bits(found, decode_fp4(values, scale, dtype, **factors))


INTEGERS = {
    "GPTQ": lambda dtype: gptq(96, 160, dtype=dtype),
    "GPTQ of version 2, reordered": lambda dtype: gptq(
        64, 128, version=2, is_reordered=True, dtype=dtype
    ),
    "GPTQ in 2 bits": lambda dtype: gptq(64, 128, bits=2, dtype=dtype),
    "GPTQ in 3 bits": lambda dtype: gptq(64, 128, bits=3, dtype=dtype),
    "GPTQ in 3 bits of version 2": lambda dtype: gptq(64, 96, bits=3, version=2, dtype=dtype),
    "GPTQ in 8 bits": lambda dtype: gptq(64, 128, bits=8, dtype=dtype),
    "AWQ": lambda dtype: awq(72, 128, dtype=dtype),
    "rows": lambda dtype: compressed(37, 1088, group_size=64, dtype=dtype),
    "rows with zero points": lambda dtype: compressed(70, 128, is_symmetric=False, dtype=dtype),
    "rows in 2 bits": lambda dtype: compressed(8, 64, bits=2, is_symmetric=False, dtype=dtype),
    "rows in 3 bits": lambda dtype: compressed(9, 96, bits=3, is_symmetric=False, dtype=dtype),
    "rows in 6 bits": lambda dtype: compressed(40, 64, bits=6, is_symmetric=False, dtype=dtype),
    "rows in 8 bits": lambda dtype: compressed(9, 61, bits=8, group_size=None, dtype=dtype),
    "rows with zero points in bytes": lambda dtype: compressed(
        40, 128, is_symmetric=False, has_packed_zeros=False, is_reordered=True, dtype=dtype
    ),
    "torchao": lambda dtype: torchao(37, 1088, dtype=dtype),
}
NAMES = {
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
    ),
    "torchao": ("_weight_qdata", "_weight_scale", "_weight_zero_point", ""),
    "GPTQ": ("qweight", "scales", "qzeros", "g_idx"),
    "AWQ": ("qweight", "scales", "qzeros", ""),
}


Described = tuple[IntegerLayout, list[torch.Tensor | None]]


def described(case: str, weight: Weight) -> Described:
    """Returns how codes lie; and words, scales, zero points and group index."""
    packing = case.split()[0].replace("rows", "compressed-tensors")
    parts = [weight.parts.get(name) for name in NAMES[packing]]
    if packing == "torchao":
        parts[0] = parts[0].view(torch.int32)
    found = re.search("in ([0-9]) bits", case)
    columns = weight.decoded.shape[1]
    group_size = columns // parts[1].shape[1] if packing == "compressed-tensors" else 32
    less_one = packing == "GPTQ" and "version 2" not in case
    bits = int(found[1]) if found else 4
    return IntegerLayout(packing, bits, columns, group_size, less_one), parts


@pytest.mark.parametrize("case", INTEGERS)
def test_packed_integers(case: str):
    for dtype in DTYPES:
        weight = INTEGERS[case](dtype)
        layout, (values, scale, zeros, index) = described(case, weight)
        dtypes = [None if part is None else part.dtype for part in (zeros, index)]
        codec = integer_decoder(
            DEVICE, dtype, scale.dtype, layout.packing, layout.bits, dtypes[0],
            layout.zeros_less_one, dtypes[1],
        )  # fmt: skip
        pointers = [values if part is None else part for part in (values, scale, zeros, index)]
        lines = [part.shape[1] if part.dim() == 2 else 1 for part in pointers[:3]]
        found = by_kernel(codec, pointers, weight.decoded.shape, *lines, layout.group_size)
        same_bits(found, weight.decoded)
