"""Runs the PTX of inference/kernels/product/ without a GPU (ptx_machine.py).

This is a program of its own, because Triton cannot compile in a process whose kernels are
interpreted.
"""

from typing import Any

import numpy as np
import torch
import triton
from products import assert_close_to_exact, packed_weight
from ptx_machine import GLOBAL, Machine
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nf4conv.codec.kernels import tables
from nf4conv.codec.quant_state import QuantState, decoding_of
from nf4conv.inference.kernels.product import balancing, held, kernel, shapes
from nf4conv.inference.kernels.product.launches import PackedWeight

TARGETS = {True: GPUTarget("cuda", 90, 32), False: GPUTarget("cuda", 80, 32)}  # by Shape.early
PROCESSORS = 3  # multiprocessors of the GPU that kernels are divided for


def compiled(shape: shapes.Shape | shapes.Held, dtype: torch.dtype, out: torch.dtype) -> str:
    """Compiles product_kernel and returns its PTX."""
    kinds = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
    absmax = "*u8" if shape.nested else "*fp32"
    weight = PackedWeight("*u8", absmax, "*fp32", "*fp32", "*fp32")
    signature: dict[str, Any] = {"x_ptr": kinds[dtype], "out_ptr": kinds[out], "weight": weight}
    signature |= {"pair_ptr": "*i32"}
    signature |= dict.fromkeys(
        ("m", "n", "k", "steps", "share", "programs", "longer", "split_shift", "block_shift"), "i32"
    )
    signature |= {"norm": "fp32", "SHAPE": "constexpr"}
    function = held.held_kernel if isinstance(shape, shapes.Held) else kernel.product_kernel
    signature = {name: signature[name] for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs={"SHAPE": shape})
    options = {
        "num_warps": shape.warps,
        "maxnreg": shape.registers,
        "launch_pdl": shape.early,
        "enable_fp_fusion": False,
    }
    return triton.compile(source, target=TARGETS[shape.early], options=options).asm["ptx"]


def multiply(
    x: torch.Tensor,
    packed: torch.Tensor,
    state: QuantState,
    hopper: bool,
    shape: shapes.Shape | shapes.Held | None = None,
) -> torch.Tensor:
    """Multiplies with the kernel, as programs one after the other; of the shape that a GPU with
    PROCESSORS takes for these sizes, or another.

    Plain torch does what stands around the kernel.
    """
    decoding = decoding_of(state)
    m, k = x.shape
    n = state.shape[0]
    if shape is None:
        form = decoding.form()
        shape, division = balancing.plan_rows(m, n, k, form, PROCESSORS, hopper)
    else:
        division = balancing.divide(shape, n, k, shape.programs * PROCESSORS)
    shift = division.split_shift
    out = torch.full((1 << shift, m, n), float("nan"), dtype=torch.float32 if shift else x.dtype)
    pairs = tables.pair_table(decoding.quant_type, x.dtype, torch.device("cpu"))
    buffers = {}
    for i, tensor in enumerate((x, out, packed, *decoding.pointers(), pairs), start=1):
        buffers[i] = tensor.reshape(-1).view(torch.uint8).numpy().copy()
    norm = np.float32(1 / tables.MULTIPLES[decoding.quant_type, x.dtype])
    block_shift = (decoding.blocksize // 64).bit_length() - 1
    scaling = [block_shift, int(norm.view(np.uint32))]
    addresses = [i * GLOBAL for i in buffers]
    sizes = [m, n, k, *division.arguments()]
    values = [*addresses, *sizes, *scaling, 0, 0]
    name = "held_kernel" if isinstance(shape, shapes.Held) else "product_kernel"
    parameters = {f"{name}_param_{i}": value for i, value in enumerate(values)}
    ptx = compiled(shape, x.dtype, out.dtype)
    machine = Machine(ptx, 32 * shape.warps, parameters, buffers, division.programs)
    for program in range(division.programs):
        machine.run(program)
    parts = torch.from_numpy(buffers[2]).view(out.dtype).view(out.shape)
    return parts.sum(0, dtype=torch.float32).to(x.dtype)


def run_other_shapes() -> None:
    """Multiplies with shapes that are chosen for larger products."""
    held = next(one for one in shapes.HELD_SHAPES if one.warps == 4)
    for m, n, k, shape in (
        (1, 70, 5120, held),
        (7, 300, 1088, balancing.PACES[8][-1].shape),
        (12, 300, 1088, balancing.PACES[16][-1].shape),
    ):
        packed, state = packed_weight(n, k)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
        assert_close_to_exact(multiply(x, packed, state, True, shape), x, packed, state)
        print("other", m, n, k, shape)


if __name__ == "__main__":
    run_other_shapes()
    for turn, (m, n, k, quant_type, blocksize, nested, dtype) in enumerate(
        (
            (1, 37, 576, "nf4", 64, True, torch.bfloat16),
            (1, 300, 4160, "nf4", 64, True, torch.bfloat16),
            # more units than wait for each other's sums
            (1, 700, 192, "nf4", 64, False, torch.bfloat16),
            (2, 420, 2240, "nf4", 64, True, torch.float16),
            (1, 300, 5120, "fp4", 128, False, torch.float16),
            (1, 33, 14336, "nf4", 4096, True, torch.float16),
            (2, 200, 2112, "fp4", 128, False, torch.bfloat16),
            (2, 1, 64, "nf4", 64, False, torch.float16),
            (2, 500, 4224, "nf4", 64, True, torch.bfloat16),
            (3, 70, 4160, "fp4", 4096, True, torch.float16),
            (4, 300, 1088, "nf4", 64, True, torch.bfloat16),
            (5, 300, 576, "nf4", 64, True, torch.bfloat16),
            (13, 1000, 320, "fp4", 64, True, torch.bfloat16),
            (16, 130, 4160, "nf4", 128, True, torch.float16),
            (32, 1500, 192, "fp4", 64, False, torch.bfloat16),
            (31, 130, 2112, "nf4", 64, True, torch.float16),
            (40, 300, 1088, "nf4", 64, True, torch.bfloat16),
            (64, 900, 320, "nf4", 4096, False, torch.float16),
        )
    ):
        packed, state = packed_weight(n, k, quant_type, blocksize, nested)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
        for hopper in (True, False)[: 2 if turn % 3 == 0 else 1]:
            assert_close_to_exact(multiply(x, packed, state, hopper), x, packed, state)
            print(m, n, k, quant_type, blocksize, nested, dtype, hopper)
