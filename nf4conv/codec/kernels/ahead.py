"""The kernels compiled ahead of a run, as bytes: what a program without torch and Triton needs to launch them."""

from dataclasses import dataclass
from typing import Any

import torch

from nf4conv.codec.kernels.batch import compress_batch_kernel, quantize_batch_kernel
from nf4conv.codec.kernels.dequantize import CONFIGURATIONS as DECODING
from nf4conv.codec.kernels.dequantize import dequantize_kernel
from nf4conv.codec.kernels.finite import NUM_WARPS as FINITE_NUM_WARPS
from nf4conv.codec.kernels.finite import TILE as FINITE_TILE
from nf4conv.codec.kernels.finite import exponent_mask, non_finite_kernel
from nf4conv.codec.kernels.mean import NUM_WARPS as MEAN_NUM_WARPS
from nf4conv.codec.kernels.mean import mean_kernel, partial_kernel, repeats_torch, resident_blocks, total_kernel
from nf4conv.codec.kernels.nested import NUM_WARPS as NESTED_NUM_WARPS
from nf4conv.codec.kernels.nested import ROWS
from nf4conv.codec.kernels.quantize import CONFIGURATIONS as PACKING
from nf4conv.codec.kernels.quantize import ELEMENTWISE, SLOTWISE, configuration
from nf4conv.codec.kernels.search import CONFIGURATIONS as SEARCHING
from nf4conv.codec.kernels.tables import bucket_table, middle_table, search_table, value_table
from nf4conv.codec.mean_order import TORCH_BLOCK
from nf4conv.format.codebook import NESTED_BLOCKSIZE


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one kernel.

    Attributes:
        cubin: the code.
        entry: the kernel's name in there.
        shared: bytes of shared memory for each program.
        threads: of each program.
    """

    cubin: bytes
    entry: str
    shared: int
    threads: int


@dataclass(frozen=True)
class CompiledCodec:
    """Everything that encodes, or decodes, weights of one dtype in one format on one kind of GPU.

    Attributes:
        kernels: by name.
        tables: what they read, by name.
        numbers: what their callers must know, by name.
    """

    kernels: dict[str, CompiledKernel]
    tables: dict[str, bytes]
    numbers: dict[str, int]


def compile_encoder(
    device: torch.device, dtype: torch.dtype, quant_type: str, blocksize: int, scales: str
) -> CompiledCodec | None:
    """Compile what packs weights, with "absmax" or "search" for scales.

    Returns:
        kernels: "quantize_aligned", "quantize_any", "compress", "mean", "mean_part", "mean_total", "finite".
        tables: "codes", "middles".
        numbers: "tile", elements that a program of the quantizing kernels encodes; "nested_tile", absmax values that
            one of "compress" encodes; "slot", elements whose multiples "quantize_aligned" takes; "finite_tile", words
            that one of "finite" looks at; "resident_blocks", see mean_order.thread_blocks.
        Or None if this release of torch takes a mean in another order than our kernels, on this device.
    """
    if not repeats_torch(device):
        return None
    search = scales == "search"
    tile, num_warps = configuration(dtype, blocksize, SEARCHING if search else PACKING)
    integers = torch.empty(1, dtype=torch.int64, device=device)
    floats = torch.empty(1, dtype=torch.float32, device=device)
    words = torch.empty(1, dtype=torch.int32, device=device)
    codes, middles = (search_table if search else bucket_table)(quant_type, device), middle_table(device)
    example = torch.empty(0, dtype=dtype, device=device)
    fp4 = quant_type == "fp4"
    quantize = (integers, example, codes, 1, blocksize, tile, fp4)
    kernels = {
        "quantize_aligned": _compile(quantize_batch_kernel, (*quantize, SLOTWISE, True, search), num_warps),
        "quantize_any": _compile(quantize_batch_kernel, (*quantize, ELEMENTWISE, True, search), num_warps),
        "compress": _compile(compress_batch_kernel, (integers, floats, middles, 1, ROWS, True), NESTED_NUM_WARPS),
        "mean": _compile(mean_kernel, (integers, floats, 1, TORCH_BLOCK), MEAN_NUM_WARPS),
        "mean_part": _compile(partial_kernel, (floats, floats, 1, 1), MEAN_NUM_WARPS),
        "mean_total": _compile(total_kernel, (floats, floats, 1, 1), MEAN_NUM_WARPS),
        "finite": _compile(
            non_finite_kernel,
            (words, words, 1, exponent_mask(dtype), dtype.itemsize == 2, FINITE_TILE),
            FINITE_NUM_WARPS,
        ),
    }
    tables = {"codes": _bytes(codes), "middles": _bytes(middles)}
    numbers = {
        "tile": tile,
        "nested_tile": ROWS * NESTED_BLOCKSIZE,
        "slot": 16 // dtype.itemsize,
        "finite_tile": FINITE_TILE,
        "resident_blocks": resident_blocks(device),
    }
    return CompiledCodec(kernels, tables, numbers)


def compile_decoder(device: torch.device, dtype: torch.dtype, quant_type: str, blocksize: int) -> CompiledCodec:
    """Compile what unpacks weights.

    Returns:
        kernels: "plain_aligned", "plain_any", "nested_aligned", "nested_any".
        tables: "values".
        numbers: "tile", elements that a program decodes; "slot", elements whose multiples the aligned kernels take.
    """
    packed = torch.empty(0, dtype=torch.uint8, device=device)
    floats = torch.empty(0, dtype=torch.float32, device=device)
    out = torch.empty(0, dtype=dtype, device=device)
    values = value_table(quant_type, device)
    tile, num_warps = configuration(dtype, blocksize, DECODING)
    kernels = {}
    for name, absmax, is_nested in (("plain", floats, False), ("nested", packed, True)):
        nested = (floats, floats, floats) if is_nested else (absmax, absmax, absmax)
        for kind, access in (("aligned", SLOTWISE), ("any", ELEMENTWISE)):
            arguments = (packed, absmax, *nested, values, out, 1, blocksize, tile, is_nested, access, True, True)
            kernels[f"{name}_{kind}"] = _compile(dequantize_kernel, arguments, num_warps)
    return CompiledCodec(kernels, {"values": _bytes(values)}, {"tile": tile, "slot": 16 // dtype.itemsize})


def _compile(kernel: Any, arguments: tuple[Any, ...], num_warps: int) -> CompiledKernel:
    compiled = kernel.warmup(*arguments, grid=(1,), num_warps=num_warps, enable_fp_fusion=False)
    return CompiledKernel(
        cubin=compiled.asm["cubin"],
        entry=compiled.metadata.name,
        shared=compiled.metadata.shared,
        threads=32 * num_warps,
    )


def _bytes(table: torch.Tensor) -> bytes:
    raw: bytes = table.cpu().numpy().tobytes()
    return raw
