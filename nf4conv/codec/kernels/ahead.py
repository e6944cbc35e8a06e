"""Says what kernels a program without torch and Triton takes for a purpose.

Each function that returns a `Codec` is named by a value of the engine's Action. Its `device` is
where the kernels will run; on a CPU they are for Triton's interpreter, without inline assembly.
compiling.py compiles them.
"""

from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.codec.kernels import difference, error
from nf4conv.codec.kernels.compiling import Variant
from nf4conv.codec.kernels.decoding import cast, dequantize, fp4, halves, integers, scaled
from nf4conv.codec.kernels.decoding.ggml import decoding as ggml
from nf4conv.codec.kernels.decoding.scaled import kind_of, stored
from nf4conv.codec.kernels.packing import batch, finite, mean, nested, pack
from nf4conv.codec.kernels.slots import ELEMENTWISE, SLOTWISE, configuration
from nf4conv.codec.kernels.tables import bound_table, middle_table, value_table
from nf4conv.codec.quant_state import code_table
from nf4conv.format.codebook import NESTED_BLOCKSIZE

# Tensors that say only of what dtype an argument is.
_UINT8: Final = torch.empty(0, dtype=torch.uint8)
_INT32: Final = torch.empty(0, dtype=torch.int32)
_INT64: Final = torch.empty(0, dtype=torch.int64)
_FLOAT32: Final = torch.empty(0, dtype=torch.float32)
_FLOAT64: Final = torch.empty(0, dtype=torch.float64)

_ACCESSES: Final = (("aligned", SLOTWISE), ("any", ELEMENTWISE))
"""Kernels by how they may touch memory: the end of their names, and the constexpr."""


@dataclass(frozen=True)
class Codec:
    """Kernels for one purpose on one kind of GPU.

    Attributes:
        kernels: by name.
        tables: the bytes of the tables that the kernels read, by name.
        numbers: what the kernels' callers must know, by name.
    """

    kernels: dict[str, Variant]
    tables: dict[str, bytes]
    numbers: dict[str, int]


def encoder(
    device: torch.device, dtype: torch.dtype, quant_type: str, blocksize: int, scales: str
) -> Codec:
    """Return what packs weights of one dtype.

    Args:
        device: of the kernels.
        dtype: of the weights: float32, float16 or bfloat16.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one scale.
        scales: "absmax" or "search".

    Returns:
        kernels: "quantize_aligned", "quantize_any", "compress", "mean", "mean_part", "mean_total",
            "finite".
        tables: "codes", "middles".
        numbers: "tile", elements that a program of the quantizing kernels encodes; "nested_tile",
            absmax values that one of "compress" encodes; "slot", elements whose multiples
            "quantize_aligned" takes; "finite_tile", words that one of "finite" looks at;
            "resident_blocks", see mean_order.thread_blocks.
    """
    on_gpu = device.type == "cuda"
    searches = scales == "search"
    tile, num_warps = pack.packing(dtype, blocksize, searches)
    kernels = {}
    for access_name, access in _ACCESSES:
        kernels[f"quantize_{access_name}"] = Variant(
            batch.quantize_batch_kernel,
            (
                _INT64,  # the table of tensors
                torch.empty(0, dtype=dtype),
                _INT32,  # the table of codes
                1,
                blocksize,
                tile,
                quant_type == "fp4",
                access,
                on_gpu,
                searches,
            ),
            num_warps,
        )
    kernels["compress"] = Variant(
        batch.compress_batch_kernel, (_INT64, _FLOAT32, _FLOAT32, 1, on_gpu), nested.NUM_WARPS
    )
    kernels["mean"] = Variant(mean.mean_kernel, (_INT64, _FLOAT32, 1), mean.NUM_WARPS)
    kernels["mean_part"] = Variant(mean.partial_kernel, (_FLOAT32, _FLOAT32, 1, 1), mean.NUM_WARPS)
    kernels["mean_total"] = Variant(mean.total_kernel, (_FLOAT32, _FLOAT32, 1, 1), mean.NUM_WARPS)
    kernels["finite"] = Variant(
        finite.non_finite_kernel,
        (_INT32, _INT32, 1, finite.exponent_mask(dtype), dtype.itemsize == 2),
        finite.NUM_WARPS,
    )
    tables = {
        "codes": _bytes(pack.packing_table(quant_type, device, searches)),
        "middles": _bytes(middle_table(device)),
    }
    numbers = {
        "tile": tile,
        "nested_tile": NESTED_BLOCKSIZE,
        "slot": 16 // dtype.itemsize,
        "finite_tile": finite.TILE.value,
        "resident_blocks": mean.resident_blocks(device),
    }
    return Codec(kernels, tables, numbers)


def decoder(device: torch.device, dtype: torch.dtype, quant_type: str, blocksize: int) -> Codec:
    """Return what unpacks weights to one dtype.

    Args:
        device: of the kernels.
        dtype: of the result: float32, float16 or bfloat16.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax.

    Returns:
        kernels: "plain_aligned", "plain_any", "nested_aligned", "nested_any".
        tables: "values".
        numbers: "tile", elements that a program decodes; "slot", elements whose multiples the
            aligned kernels take.
    """
    tile, num_warps = configuration(dtype, blocksize, dequantize.CONFIGURATIONS)
    kernels = {}
    for absmax_name, absmax in (("plain", _FLOAT32), ("nested", _UINT8)):
        for access_name, access in _ACCESSES:
            kernels[f"{absmax_name}_{access_name}"] = Variant(
                dequantize.dequantize_kernel,
                (
                    _UINT8,  # packed codes
                    absmax,
                    _FLOAT32,  # nested code
                    _FLOAT32,  # nested absmax
                    _FLOAT32,  # offset
                    _INT32,  # values of codes
                    torch.empty(0, dtype=dtype),
                    1,
                    blocksize,
                    tile,
                    access,
                    True,
                    device.type == "cuda",
                ),
                num_warps,
            )
    tables = {"values": _bytes(value_table(quant_type, device))}
    return Codec(kernels, tables, {"tile": tile, "slot": 16 // dtype.itemsize})


def comparer(
    device: torch.device,
    dtype: torch.dtype,
    quant_type: str,
    blocksize: int,
    scales: str,
    double_quant: bool,
) -> Codec:
    """Return what measures the error of weights that `encoder` has packed.

    Args:
        device: of the kernels.
        dtype: of the weights: float32, float16 or bfloat16.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one scale.
        scales: "absmax" or "search".
        double_quant: True if the scales are quantized too.

    Returns:
        kernels: "compare".
        tables: "values", "bounds"; "nested", the values of 8-bit scales.
        numbers: "tile", elements that a program looks at.
    """
    tile, num_warps = configuration(dtype, blocksize, error.CONFIGURATIONS)
    kernel = Variant(
        error.error_kernel,
        (
            torch.empty(0, dtype=dtype),
            _UINT8,  # packed codes
            _UINT8 if double_quant else _FLOAT32,  # absmax
            _FLOAT32,  # nested code
            _FLOAT32,  # nested absmax
            _FLOAT32,  # offset
            _INT32,  # values of codes
            _INT32,  # bounds of codes
            _FLOAT32,  # peaks
            _FLOAT64,  # squares
            _INT64,  # outside
            1,
            1,
            blocksize,
            tile,
            ELEMENTWISE,
            device.type == "cuda",
        ),
        num_warps,
    )
    tables = {
        "values": _bytes(value_table(quant_type, device)),
        "bounds": _bytes(bound_table(quant_type, scales, device)),
        "nested": _bytes(code_table("dynamic", device)),
    }
    return Codec({"compare": kernel}, tables, {"tile": tile * error.TILES.value})


def subtractor(_device: torch.device, a: torch.dtype, b: torch.dtype) -> Codec:
    """Return what finds out how far two vectors are apart.

    Args:
        _device: of the kernels, which are the same on all.
        a: dtype of one vector: float32, float16 or bfloat16.
        b: dtype of the other.

    Returns:
        kernels: "subtract".
        tables: none.
        numbers: "tile", elements that a program looks at.
    """
    kernel = Variant(
        difference.difference_kernel,
        (torch.empty(0, dtype=a), torch.empty(0, dtype=b), _FLOAT64, 1, 1),
        difference.NUM_WARPS,
    )
    tile = difference.TILE.value * difference.STEPS.value
    return Codec({"subtract": kernel}, {}, {"tile": tile})


def scaled_decoder(
    _device: torch.device,
    out: torch.dtype,
    values: torch.dtype,
    scale: torch.dtype,
    block: tuple[int, int],
    by_127: bool,
    aligned: bool,
) -> Codec:
    """Return what decodes 8-bit values with scales, see scaled.decode_scaled.

    Args:
        _device: of the kernels, which are the same on all.
        out: dtype of the result: float32, float16 or bfloat16.
        values: dtype of the values.
        scale: dtype of the scales.
        block: (rows, columns) that share a scale.
        by_127: True to multiply each product by 1 / 127 too.
        aligned: True if rows are multiples of 16 values.

    Returns:
        kernels: "decode".
        tables: none.
        numbers: "rows", "columns" of a program.
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
    """Return what decodes MXFP4 and NVFP4, see fp4.decode_fp4.

    Args:
        _device: of the kernels, which are the same on all.
        out: dtype of the result: float32, float16 or bfloat16.
        scale: dtype of the scales.
        group_pairs: pairs of values that share a scale.
        divisor: dtype of the number that scales are divided by; None if they are not.
        multiplier: dtype of the number that scales are multiplied with; None if they are not.
        aligned: True if rows are multiples of 16 pairs.
        transposed: True to write the result as [columns, rows].

    Returns:
        kernels: "decode".
        tables: none.
        numbers: "rows", "columns" of a program, in pairs.
    """
    example_scale = torch.empty(0, dtype=scale)
    example_divisor = example_scale if divisor is None else torch.empty(0, dtype=divisor)
    example_multiplier = example_scale if multiplier is None else torch.empty(0, dtype=multiplier)
    kernel = Variant(
        fp4.fp4_kernel,
        (
            _UINT8,  # pairs of values
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
) -> Codec:
    """Return what decodes packed integers, see integers.decode_integers.

    Args:
        _device: of the kernels, which are the same on all.
        out: dtype of the result: float32, float16 or bfloat16.
        scale: dtype of the scales.
        packing: "compressed-tensors", "GPTQ" or "AWQ".
        bits: of a code.
        zeros: dtype of the zero points; None if there are none.
        zeros_less_one: True if they are stored one too small.
        index: dtype of the group of each column; None if groups are in order.

    Returns:
        kernels: "decode".
        tables: none.
        numbers: "rows", "columns" of a program.
    """
    kind = integers.PACKINGS[packing]
    tile = integers.tile_of(kind)
    kernel = Variant(
        integers.integers_kernel,
        (
            _INT32,  # words
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
            tile.rows,
            tile.columns,
        ),
        integers.NUM_WARPS,
    )
    return Codec({"decode": kernel}, {}, {"rows": tile.rows, "columns": tile.columns})


def ggml_decoder(
    device: torch.device,
    out: torch.dtype,
    number: int,
    changed: str | None,
) -> Codec:
    """Return what decodes the blocks of GGUF, see kernels/decoding/ggml/.

    Args:
        device: of the kernels.
        out: dtype of the result: float32, float16 or bfloat16.
        number: of the block type in ggml.h.
        changed: what llama.cpp's converter did, and the kernel undoes: a word of format/gguf.py;
            None if it did nothing.

    Returns:
        kernels: "decode".
        tables: "grid", coordinates of points; a single one for types without.
        numbers: "rows", "columns" of a program.
    """
    kernel = Variant(
        ggml.ggml_kernel,
        (
            _UINT8,  # blocks
            torch.empty(0, dtype=torch.int8),
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
    tables = {"grid": _bytes(ggml.grid_of(number, device))}
    numbers = {"rows": ggml.TILE_ROWS.value, "columns": ggml.TILE_COLUMNS.value}
    return Codec({"decode": kernel}, tables, numbers)


def halves_decoder(
    _device: torch.device, out: torch.dtype, scale: torch.dtype, bits: int, axis: int
) -> Codec:
    """Return what decodes weights of HQQ, see halves.decode_halves.

    Args:
        _device: of the kernels, which are the same on all.
        out: dtype of the result: float32, float16 or bfloat16.
        scale: dtype of the scales.
        bits: of a code.
        axis: 1 if groups are runs of elements, 0 if their elements are at equal distances.

    Returns:
        kernels: "within", "across": for one run of words, and for two.
        tables: none.
        numbers: "tile", elements that a program decodes.
    """
    words = _INT32 if bits == 3 else _UINT8
    example_scale = torch.empty(0, dtype=scale)
    pointers = (words, words, example_scale, example_scale, torch.empty(0, dtype=out))
    numbers = (1, 1, 1, 1, 1, 1)
    kernels = {}
    for name, goes_on in (("within", False), ("across", True)):
        constants = (bits, axis, goes_on)
        kernels[name] = Variant(
            halves.halves_kernel, (*pointers, *numbers, *constants), halves.NUM_WARPS
        )
    return Codec(kernels, {}, {"tile": halves.TILE.value})


def caster(_device: torch.device, source: torch.dtype, target: torch.dtype) -> Codec:
    """Return what casts values of one dtype to another.

    Args:
        _device: of the kernels, which are the same on all.
        source: float32, float16 or bfloat16.
        target: one of these.

    Returns:
        kernels: "cast".
        tables: none.
        numbers: "tile", values that a program casts.
    """
    kernel = Variant(
        cast.cast_kernel,
        (torch.empty(0, dtype=source), torch.empty(0, dtype=target), _INT32, 1),
        cast.NUM_WARPS,
    )
    return Codec({"cast": kernel}, {}, {"tile": cast.TILE.value})


def _bytes(table: torch.Tensor) -> bytes:
    """Return the bytes of a table."""
    raw: bytes = table.cpu().numpy().tobytes()
    return raw
