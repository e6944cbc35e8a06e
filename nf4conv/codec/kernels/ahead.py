"""The kernels compiled ahead of a run, as bytes: what a program without torch and Triton needs to
launch them.
"""

import base64
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from nf4conv.codec.kernels import difference, error
from nf4conv.codec.kernels.decoding import cast, dequantize, fp4, scaled
from nf4conv.codec.kernels.decoding.scaled import kind_of, stored
from nf4conv.codec.kernels.packing import batch, finite, mean, nested, pack
from nf4conv.codec.kernels.slots import ELEMENTWISE, SLOTWISE, configuration
from nf4conv.codec.kernels.tables import bound_table, middle_table, value_table
from nf4conv.codec.quant_state import code_table
from nf4conv.format.codebook import NESTED_BLOCKSIZE

_ACCESSES: Final = (("aligned", SLOTWISE), ("any", ELEMENTWISE))
_LONGEST: Final = (
    120  # seconds that compiling in several processes may take before it is done in this one
)


class Variant(NamedTuple):
    """A kernel that is to be compiled."""

    kernel: Any  # the function
    arguments: tuple[
        Any, ...
    ]  # tensors of the right dtypes, any integers, and its constexprs, in its order
    num_warps: int  # of 32 threads, for each program


@dataclass(frozen=True)
class Codec:
    """Kernels for one purpose on one kind of GPU."""

    kernels: dict[str, Variant]  # by name
    tables: dict[str, bytes]  # what they read, by name
    numbers: dict[str, int]  # what their callers must know, by name


def encoder(
    device: torch.device, dtype: torch.dtype, quant_type: str, blocksize: int, scales: str
) -> Codec:
    """What packs weights of one dtype, with "absmax" or "search" for scales.

    Returns:
        kernels: "quantize_aligned", "quantize_any", "compress", "mean", "mean_part", "mean_total",
            "finite".
        tables: "codes", "middles".
        numbers: "tile", elements that a program of the quantizing kernels encodes; "nested_tile",
            absmax values that one of "compress" encodes; "slot", elements whose multiples
            "quantize_aligned" takes; "finite_tile", words that one of "finite" looks at;
            "resident_blocks", see mean_order.thread_blocks.
    """
    searches = scales == "search"
    tile, num_warps = pack.packing(dtype, blocksize, searches)
    integers, floats, words = (
        torch.empty(1, dtype=kind) for kind in (torch.int64, torch.float32, torch.int32)
    )
    quantize = (
        integers,
        torch.empty(0, dtype=dtype),
        words,
        1,
        blocksize,
        tile,
        quant_type == "fp4",
    )
    values = (words, words, 1, finite.exponent_mask(dtype), dtype.itemsize == 2)
    absmax = (integers, floats, floats, 1, device.type == "cuda")
    kernels = {
        **{
            f"quantize_{kind}": Variant(
                batch.quantize_batch_kernel,
                (*quantize, access, device.type == "cuda", searches),
                num_warps,
            )
            for kind, access in _ACCESSES
        },
        "compress": Variant(batch.compress_batch_kernel, absmax, nested.NUM_WARPS),
        "mean": Variant(mean.mean_kernel, (integers, floats, 1), mean.NUM_WARPS),
        "mean_part": Variant(mean.partial_kernel, (floats, floats, 1, 1), mean.NUM_WARPS),
        "mean_total": Variant(mean.total_kernel, (floats, floats, 1, 1), mean.NUM_WARPS),
        "finite": Variant(finite.non_finite_kernel, values, finite.NUM_WARPS),
    }
    codes = pack.packing_table(quant_type, device, searches)
    tables = {"codes": _bytes(codes), "middles": _bytes(middle_table(device))}
    numbers = {
        "tile": tile,
        "nested_tile": NESTED_BLOCKSIZE,
        "slot": 16 // dtype.itemsize,
        "finite_tile": finite.TILE.value,
        "resident_blocks": mean.resident_blocks(device),
    }
    return Codec(kernels, tables, numbers)


def decoder(device: torch.device, dtype: torch.dtype, quant_type: str, blocksize: int) -> Codec:
    """What unpacks weights to one dtype.

    Returns:
        kernels: "plain_aligned", "plain_any", "nested_aligned", "nested_any".
        tables: "values".
        numbers: "tile", elements that a program decodes; "slot", elements whose multiples the
            aligned kernels take.
    """
    tile, num_warps = configuration(dtype, blocksize, dequantize.CONFIGURATIONS)
    out, values = torch.empty(0, dtype=dtype), value_table(quant_type, device)
    packed, floats = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.float32)
    on_gpu = device.type == "cuda"
    kernels = {}
    for name, absmax in (("plain", floats), ("nested", packed)):
        for kind, access in _ACCESSES:
            arguments = (packed, absmax, floats, floats, floats, values, out, 1)
            constants = (blocksize, tile, access, True, on_gpu)
            kernels[f"{name}_{kind}"] = Variant(
                dequantize.dequantize_kernel, (*arguments, *constants), num_warps
            )
    return Codec(kernels, {"values": _bytes(values)}, {"tile": tile, "slot": 16 // dtype.itemsize})


def comparer(
    device: torch.device,
    dtype: torch.dtype,
    quant_type: str,
    blocksize: int,
    scales: str,
    double_quant: bool,
) -> Codec:
    """What measures the error of weights that `encoder` has packed.

    Returns:
        kernels: "compare".
        tables: "values", "bounds"; "nested", what 8-bit scales stand for.
        numbers: "tile", elements that a program looks at.
    """
    tile, num_warps = configuration(dtype, blocksize, error.CONFIGURATIONS)
    values, bounds = value_table(quant_type, device), bound_table(quant_type, scales, device)
    packed, floats = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.float32)
    decoding = (packed if double_quant else floats, floats, floats, floats, values, bounds)
    sums = (floats, torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64), 1, 1)
    constants = (blocksize, tile, ELEMENTWISE, device.type == "cuda")
    kernel = Variant(
        error.error_kernel,
        (torch.empty(0, dtype=dtype), packed, *decoding, *sums, *constants),
        num_warps,
    )
    tables = {
        "values": _bytes(values),
        "bounds": _bytes(bounds),
        "nested": _bytes(code_table("dynamic", device)),
    }
    return Codec({"compare": kernel}, tables, {"tile": tile * error.TILES.value})


def subtractor(_device: torch.device, a: torch.dtype, b: torch.dtype) -> Codec:
    """What finds out how far vectors are apart: the kernel "subtract", and "tile", elements that a
    program looks at.
    """
    examples = [torch.empty(0, dtype=dtype) for dtype in (a, b, torch.float64)]
    kernel = Variant(difference.difference_kernel, (*examples, 1, 1), difference.NUM_WARPS)
    return Codec({"subtract": kernel}, {}, {"tile": difference.TILE.value * difference.STEPS.value})


def scaled_decoder(
    _device: torch.device,
    out: torch.dtype,
    values: torch.dtype,
    scale: torch.dtype,
    block: tuple[int, int],
    by_127: bool,
    aligned: bool,
) -> Codec:
    """What decodes 8-bit values with scales, as scaled.decode_scaled; `aligned` says if rows are
    multiples of 16.

    Returns:
        kernels: "decode".
        numbers: "rows", "columns" of a program.
    """
    examples = [torch.empty(0, dtype=dtype) for dtype in (values, scale)]
    arguments = (*map(stored, examples), torch.empty(0, dtype=out), *[1] * 5)
    constants = (*block, *map(kind_of, examples), by_127, aligned)
    kernels = {"decode": Variant(scaled.scaled_kernel, (*arguments, *constants), scaled.NUM_WARPS)}
    return Codec(
        kernels, {}, {"rows": scaled.TILE_ROWS.value, "columns": scaled.TILE_COLUMNS.value}
    )


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
    """What decodes MXFP4 and NVFP4, as fp4.decode_fp4; `aligned` says if rows are multiples of 16
    pairs.

    `transposed` says that what is decoded is written as [columns, rows].

    Returns:
        kernels: "decode".
        numbers: "rows", "columns" of a program, in pairs.
    """
    scales = torch.empty(0, dtype=scale)
    factors = [
        stored(scales if dtype is None else torch.empty(0, dtype=dtype))
        for dtype in (divisor, multiplier)
    ]
    values, result = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=out)
    constants = (
        group_pairs,
        kind_of(scales),
        divisor is not None,
        multiplier is not None,
        aligned,
        transposed,
    )
    arguments = (values, stored(scales), *factors, result, *[1] * 4, *constants)
    kernels = {"decode": Variant(fp4.fp4_kernel, arguments, fp4.NUM_WARPS)}
    return Codec(kernels, {}, {"rows": fp4.TILE_ROWS.value, "columns": fp4.TILE_PAIRS.value})


def caster(_device: torch.device, source: torch.dtype, target: torch.dtype) -> Codec:
    """What casts values of one dtype to another.

    Returns:
        kernels: "cast".
        numbers: "tile", values that a program casts.
    """
    examples = [torch.empty(0, dtype=dtype) for dtype in (source, target, torch.int32)]
    return Codec(
        {"cast": Variant(cast.cast_kernel, (*examples, 1), cast.NUM_WARPS)},
        {},
        {"tile": cast.TILE.value},
    )


_waiting: list[Variant] = []  # what the processes that are forked now are to compile


def compiled(variants: Sequence[Variant], capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Compile kernels, in as many processes as there are cores: Triton holds the interpreter's lock
    meanwhile.

    Args:
        variants: the kernels.
        capability: compute capability of the GPU, such as (9, 0).

    Returns:
        Of each kernel the machine code, in base64, its name in there, and bytes of shared memory
        and threads of each program.
    """
    _waiting[:] = variants
    tasks = [(number, capability) for number in range(len(variants))]
    processes = min(len(tasks), len(os.sched_getaffinity(0)))
    # a process that is ended, with all its work done, is not to tell the user that it was stopped
    quiet = signal.signal, (signal.SIGTERM, signal.SIG_DFL)
    with multiprocessing.get_context("fork").Pool(processes, *quiet) as pool:
        try:
            return pool.map_async(_compile, tasks, chunksize=1).get(_LONGEST)
        except (
            multiprocessing.TimeoutError
        ):  # a lock that another thread of ours held when we forked
            return [_compile(task) for task in tasks]


def _compile(task: tuple[int, tuple[int, int]]) -> dict[str, Any]:
    number, (major, minor) = task
    kernel, arguments, num_warps = _waiting[number]
    types, constants = {}, {}
    for place, (parameter, argument) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
            constants[(place,)] = argument
        else:
            types[parameter.name] = (
                _POINTERS[argument.dtype] if isinstance(argument, torch.Tensor) else "i64"
            )
    found = compile_source(
        ASTSource(kernel, types, constants, {}),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )
    cubin = base64.b64encode(found.asm["cubin"]).decode()
    return {
        "cubin": cubin,
        "entry": found.metadata.name,
        "shared": found.metadata.shared,
        "threads": 32 * num_warps,
    }


_POINTERS: Final = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def _bytes(table: torch.Tensor) -> bytes:
    raw: bytes = table.cpu().numpy().tobytes()
    return raw
