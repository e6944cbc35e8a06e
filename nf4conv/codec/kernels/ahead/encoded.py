"""Says what kernels decode the weights that other quantizations encoded.

Each function returns one kernel, "decode", and the "rows" and "columns" of a program. It takes the
dtype of the result (float32, float16 or bfloat16), then what `Encoding.kernel` says.
"""

import torch

from nf4conv.codec.kernels.ahead.codec import INT32, UINT8, Codec
from nf4conv.codec.kernels.compiling import Variant
from nf4conv.codec.kernels.decoding import fp4, ggml, integers, scaled
from nf4conv.codec.kernels.decoding.scaled import kind_of, stored


def scaled_decoder(
    _device: torch.device,
    out: torch.dtype,
    values: torch.dtype,
    scale: torch.dtype,
    block: tuple[int, int],
    by_127: bool,
    aligned: bool,
) -> Codec:
    """Returns what decodes 8-bit values with scales, see scaled.decode_scaled.

    Rows are aligned if they are multiples of 16 values.
    """
    height, width = block
    example_values = torch.empty(0, dtype=values)
    example_scale = torch.empty(0, dtype=scale)
    kernel = Variant(
        scaled.scaled_kernel,
        (
            stored(example_values),
            stored(example_scale),
            torch.empty(0, dtype=out),
            1,
            1,
            1,
            1,
            1,
            height,
            width,
            kind_of(example_values),
            kind_of(example_scale),
            by_127,
            aligned,
        ),
        scaled.NUM_WARPS,
    )
    numbers = {"rows": scaled.TILE_ROWS.value, "columns": scaled.TILE_COLUMNS.value}
    return Codec({"decode": kernel}, {}, numbers)


def fp4_decoder(
    _device: torch.device,
    out: torch.dtype,
    scale: torch.dtype,
    group_pairs: int,
    divisor: torch.dtype | None,
    multiplier: torch.dtype | None,
    aligned: bool,
    transposed: bool,
) -> Codec:
    """Returns what decodes MXFP4 and NVFP4, see fp4.decode_fp4.

    Columns are counted in pairs of values. Rows are aligned if they are multiples of 16 pairs.
    """
    example_scale = torch.empty(0, dtype=scale)
    example_divisor = example_scale if divisor is None else torch.empty(0, dtype=divisor)
    example_multiplier = example_scale if multiplier is None else torch.empty(0, dtype=multiplier)
    kernel = Variant(
        fp4.fp4_kernel,
        (
            UINT8,  # pairs of values
            stored(example_scale),
            stored(example_divisor),
            stored(example_multiplier),
            torch.empty(0, dtype=out),
            1,
            1,
            1,
            1,
            group_pairs,
            kind_of(example_scale),
            divisor is not None,
            multiplier is not None,
            aligned,
            transposed,
        ),
        fp4.NUM_WARPS,
    )
    return Codec(
        {"decode": kernel}, {}, {"rows": fp4.TILE_ROWS.value, "columns": fp4.TILE_PAIRS.value}
    )


def integer_decoder(
    _device: torch.device,
    out: torch.dtype,
    scale: torch.dtype,
    packing: str,
    bits: int,
    zeros: torch.dtype | None,
    zeros_less_one: bool,
    index: torch.dtype | None,
    is_signed: bool = False,
) -> Codec:
    """Returns what decodes packed integers, see integers.decode_integers.

    Without zero points, or with groups in order, their dtype is None.
    """
    kind = integers.PACKINGS[packing]
    tile = integers.tile_of(kind)
    kernel = Variant(
        integers.integers_kernel,
        (
            INT32,  # words
            torch.empty(0, dtype=scale),
            torch.empty(0, dtype=zeros or torch.int32),
            torch.empty(0, dtype=index or torch.int32),
            torch.empty(0, dtype=out),
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            kind,
            bits,
            integers.kind_of_zeros(zeros, zeros_less_one),
            index is not None,
            is_signed,
            tile.rows,
            tile.columns,
        ),
        integers.NUM_WARPS,
    )
    return Codec({"decode": kernel}, {}, {"rows": tile.rows, "columns": tile.columns})


def ggml_decoder(
    _device: torch.device, out: torch.dtype, number: int, changed: str | None
) -> Codec:
    """Returns what decodes the blocks of GGUF, see kernels/decoding/ggml.py.

    Args:
        _device: of the kernels, which are the same on all.
        out: dtype of the result: float32, float16 or bfloat16.
        number: of the block type in ggml.h.
        changed: what llama.cpp's converter did, and the kernel undoes: a word of format/gguf.py;
            None if it did nothing.

    Returns:
        kernels: "decode".
        numbers: "rows", "columns" of a program.
    """
    kernel = Variant(
        ggml.ggml_kernel,
        (
            UINT8,  # blocks
            torch.empty(0, dtype=out),
            1,
            1,
            1,
            1,
            1,
            1,
            *ggml.constants(number, changed),
        ),
        ggml.NUM_WARPS,
    )
    numbers = {"rows": ggml.TILE_ROWS.value, "columns": ggml.TILE_COLUMNS.value}
    return Codec({"decode": kernel}, {}, numbers)
