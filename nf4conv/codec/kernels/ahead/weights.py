"""Says what kernels pack weights to 4 bits, unpack them, and measure their errors."""

from typing import Final

import torch

from nf4conv.codec.kernels import error
from nf4conv.codec.kernels.ahead.codec import (
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    UINT8,
    Codec,
    bytes_of,
)
from nf4conv.codec.kernels.compiling import Variant
from nf4conv.codec.kernels.decoding import dequantize
from nf4conv.codec.kernels.packing import batch, finite, mean, nested, pack
from nf4conv.codec.kernels.slots import ELEMENTWISE, SLOTWISE, configuration
from nf4conv.codec.kernels.tables import bound_table, middle_table, value_table
from nf4conv.codec.quant_state import code_table
from nf4conv.format.codebook import NESTED_BLOCKSIZE

_ACCESSES: Final = (("aligned", SLOTWISE), ("any", ELEMENTWISE))
"""Kernels by how they may touch memory: the end of their names, and the constexpr."""


def encoder(
    device: torch.device, dtype: torch.dtype, quant_type: str, blocksize: int, scales: str
) -> Codec:
    """Returns what packs weights of one dtype.

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
                INT64,  # the table of tensors
                torch.empty(0, dtype=dtype),
                INT32,  # the table of codes
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
        batch.compress_batch_kernel, (INT64, FLOAT32, FLOAT32, 1, on_gpu), nested.NUM_WARPS
    )
    kernels["mean"] = Variant(mean.mean_kernel, (INT64, FLOAT32, 1), mean.NUM_WARPS)
    kernels["mean_part"] = Variant(mean.partial_kernel, (FLOAT32, FLOAT32, 1, 1), mean.NUM_WARPS)
    kernels["mean_total"] = Variant(mean.total_kernel, (FLOAT32, FLOAT32, 1, 1), mean.NUM_WARPS)
    kernels["finite"] = Variant(
        finite.non_finite_kernel,
        (INT32, INT32, 1, finite.exponent_mask(dtype), dtype.itemsize == 2),
        finite.NUM_WARPS,
    )
    tables = {
        "codes": bytes_of(pack.packing_table(quant_type, device, searches)),
        "middles": bytes_of(middle_table(device)),
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
    """Returns what unpacks weights to one dtype.

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
    for absmax_name, absmax in (("plain", FLOAT32), ("nested", UINT8)):
        for access_name, access in _ACCESSES:
            kernels[f"{absmax_name}_{access_name}"] = Variant(
                dequantize.dequantize_kernel,
                (
                    UINT8,  # packed codes
                    absmax,
                    FLOAT32,  # nested code
                    FLOAT32,  # nested absmax
                    FLOAT32,  # offset
                    INT32,  # values of codes
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
    tables = {"values": bytes_of(value_table(quant_type, device))}
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
            UINT8,  # packed codes
            UINT8 if double_quant else FLOAT32,  # absmax
            FLOAT32,  # nested code
            FLOAT32,  # nested absmax
            FLOAT32,  # offset
            INT32,  # values of codes
            INT32,  # bounds of codes
            FLOAT32,  # peaks
            FLOAT64,  # squares
            INT64,  # outside
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
        "values": bytes_of(value_table(quant_type, device)),
        "bounds": bytes_of(bound_table(quant_type, scales, device)),
        "nested": bytes_of(code_table("dynamic", device)),
    }
    return Codec({"compare": kernel}, tables, {"tile": tile * error.TILES.value})
