"""Says what kernels a program without torch and Triton takes for a purpose.

Each function returns a `Codec`. Its `device` is where the kernels will run; on a CPU they are for
Triton's interpreter, without inline assembly. compiling.py compiles them. Encodings in sources/
name the functions that decode them (`Encoding.kernel`). These take the dtype of the result, which
is float32, float16 or bfloat16, and return one kernel, "decode", and the "rows" and "columns" of a
program.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

from nf4conv.codec.kernels import error, vectors
from nf4conv.codec.kernels.compiling import Variant
from nf4conv.codec.kernels.decoding import dequantize, floats, ggml, integers
from nf4conv.codec.kernels.decoding.floats import kind_of, stored
from nf4conv.codec.kernels.packing import mean, nested, pack
from nf4conv.codec.kernels.slots import ELEMENTWISE, SLOTWISE, configuration
from nf4conv.codec.kernels.tables import bound_table, middle_table, value_table
from nf4conv.codec.quant_state import code_table
from nf4conv.format.codebook import NESTED_BLOCKSIZE

_ACCESSES: Final = (("aligned", SLOTWISE.value), ("any", ELEMENTWISE.value))
"""Kernels by how they may touch memory: the end of their names, and the constexpr."""

_ABSMAX: Final = (torch.float32, torch.float32, torch.float32)
"""The dtypes of what decodes absmax: its code, nested absmax and the offset."""


@dataclass(frozen=True)
class Codec:
    """Kernels for one purpose on one kind of GPU.

    Attributes:
        kernels: by name.
        tables: the bytes of the tables that the kernels read, by name.
        numbers: what the kernels' callers must know, by name.
    """

    kernels: dict[str, Variant]
    tables: dict[str, bytes] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)


def _bytes_of(table: torch.Tensor) -> bytes:
    """Returns the bytes of a table."""
    raw: bytes = table.cpu().numpy().tobytes()
    return raw


# --------------------------------------------------------------------- weights in 4 bits


def encoder(
    device: torch.device, dtype: torch.dtype, quant_type: str, blocksize: int, scales: str
) -> Codec:
    """Returns what packs weights of one dtype; `scales` are "absmax" or "search".

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
            pack.quantize_batch_kernel,
            (torch.int64, dtype, torch.int32),
            (blocksize, tile, quant_type == "fp4", access, on_gpu, searches),
            num_warps,
        )
    floats = (torch.float32, torch.float32)
    kernels["compress"] = Variant(
        nested.compress_batch_kernel, (torch.int64, *floats), (on_gpu,), nested.NUM_WARPS
    )
    kernels["mean"] = Variant(mean.mean_kernel, (torch.int64, torch.float32), (), mean.NUM_WARPS)
    kernels["mean_part"] = Variant(mean.partial_kernel, floats, (), mean.NUM_WARPS)
    kernels["mean_total"] = Variant(mean.total_kernel, floats, (), mean.NUM_WARPS)
    kernels["finite"] = Variant(
        vectors.non_finite_kernel,
        (torch.int32, torch.int32),
        (vectors.exponent_mask(dtype), dtype.itemsize == 2),
        vectors.NUM_WARPS,
    )
    tables = {
        "codes": _bytes_of(pack.packing_table(quant_type, device, searches)),
        "middles": _bytes_of(middle_table(device)),
    }
    numbers = {
        "tile": tile,
        "nested_tile": NESTED_BLOCKSIZE,
        "slot": 16 // dtype.itemsize,
        "finite_tile": vectors.FINITE_TILE.value,
        "resident_blocks": mean.resident_blocks(device),
    }
    return Codec(kernels, tables, numbers)


def decoder(device: torch.device, dtype: torch.dtype, quant_type: str, blocksize: int) -> Codec:
    """Returns what unpacks weights to one dtype.

    kernels: "plain_aligned", "plain_any", "nested_aligned", "nested_any".
    tables: "values".
    numbers: "tile", elements that a program decodes; "slot", elements whose multiples the
        aligned kernels take.
    """
    tile, num_warps = configuration(dtype, blocksize, dequantize.CONFIGURATIONS)
    kernels = {}
    for absmax_name, absmax in (("plain", torch.float32), ("nested", torch.uint8)):
        for access_name, access in _ACCESSES:
            kernels[f"{absmax_name}_{access_name}"] = Variant(
                dequantize.dequantize_kernel,
                (torch.uint8, absmax, *_ABSMAX, torch.int32, dtype),
                (blocksize, tile, access, True, device.type == "cuda"),
                num_warps,
            )
    tables = {"values": _bytes_of(value_table(quant_type, device))}
    return Codec(kernels, tables, {"tile": tile, "slot": 16 // dtype.itemsize})


def comparer(
    device: torch.device,
    dtype: torch.dtype,
    quant_type: str,
    blocksize: int,
    scales: str,
    double_quant: bool,
) -> Codec:
    """Returns what measures the error of weights that `encoder` has packed.

    kernels: "compare".
    tables: "values", "bounds"; "nested", the values of 8-bit scales.
    numbers: "tile", elements that a program looks at.
    """
    tile, num_warps = configuration(dtype, blocksize, error.CONFIGURATIONS)
    absmax = torch.uint8 if double_quant else torch.float32
    tables = (torch.int32, torch.int32)
    sums = (torch.float32, torch.float64, torch.int64)
    kernel = Variant(
        error.error_kernel,
        (dtype, torch.uint8, absmax, *_ABSMAX, *tables, *sums),
        (blocksize, tile, ELEMENTWISE.value, device.type == "cuda"),
        num_warps,
    )
    read = {
        "values": _bytes_of(value_table(quant_type, device)),
        "bounds": _bytes_of(bound_table(quant_type, scales, device)),
        "nested": _bytes_of(code_table("dynamic", device)),
    }
    return Codec({"compare": kernel}, read, {"tile": tile * error.TILES.value})


# --------------------------------------------------------------------- plain vectors


def caster(_device: torch.device, source: torch.dtype, target: torch.dtype) -> Codec:
    """Returns what casts floats to another dtype: "cast". A program casts "tile" values."""
    kernel = Variant(vectors.cast_kernel, (source, target, torch.int32), (), vectors.NUM_WARPS)
    return Codec({"cast": kernel}, numbers={"tile": vectors.CAST_TILE.value})


# --------------------------------------------------------------------- other encodings


def scaled_decoder(
    _device: torch.device,
    out: torch.dtype,
    values: torch.dtype,
    scale: torch.dtype,
    block: tuple[int, int],
    by_127: bool,
    aligned: bool,
) -> Codec:
    """Returns what decodes 8-bit values with scales. Rows are aligned if they are multiples of 16
    values.
    """
    kernel = Variant(
        floats.scaled_kernel,
        (stored(values), stored(scale), out),
        (*block, kind_of(values), kind_of(scale), by_127, aligned),
        floats.NUM_WARPS,
    )
    return _decoding(kernel, floats.TILE_ROWS.value, floats.TILE_COLUMNS.value)


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
    """Returns what decodes MXFP4 and NVFP4.

    Columns are counted in pairs of values. Rows are aligned if they are multiples of 16 pairs.
    """
    # the kernel takes pointers that it does not read
    factors = (stored(divisor or scale), stored(multiplier or scale))
    has_factors = (divisor is not None, multiplier is not None)
    kernel = Variant(
        floats.fp4_kernel,
        (torch.uint8, stored(scale), *factors, out),
        (group_pairs, kind_of(scale), *has_factors, aligned, transposed),
        floats.NUM_WARPS,
    )
    return _decoding(kernel, floats.TILE_ROWS.value, floats.TILE_PAIRS.value)


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
    """Returns what decodes packed integers.

    Without zero points, or with groups in order, their dtype is None.
    """
    kind = integers.PACKINGS[packing]
    rows, columns = integers.tile_of(kind)
    kind_of_zeros = integers.kind_of_zeros(zeros, zeros_less_one)
    kernel = Variant(
        integers.integers_kernel,
        (torch.int32, scale, zeros or torch.int32, index or torch.int32, out),
        (kind, bits, kind_of_zeros, index is not None, rows, columns),
        integers.NUM_WARPS,
    )
    return _decoding(kernel, rows, columns)


def ggml_decoder(
    _device: torch.device, out: torch.dtype, number: int, changed: str | None
) -> Codec:
    """Returns what decodes the blocks of GGUF, whose type has this number in ggml.h.

    `changed` is a word of format/gguf.py for what llama.cpp's converter did, and the kernel undoes.
    """
    constants = ggml.constants(number, changed)
    kernel = Variant(ggml.ggml_kernel, (torch.uint8, out), constants, ggml.NUM_WARPS)
    return _decoding(kernel, ggml.TILE_ROWS.value, ggml.TILE_COLUMNS.value)


def _decoding(kernel: Variant, rows: int, columns: int) -> Codec:
    """Returns a kernel that decodes so many rows and columns in a program."""
    return Codec({"decode": kernel}, numbers={"rows": rows, "columns": columns})
