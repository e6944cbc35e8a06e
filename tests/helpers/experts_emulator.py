"""Runs the PTX of inference/kernels/experts/rows.py without a GPU, launched as
inference/experts/product.py does.

This is a program of its own, as emulator.py is, because Triton cannot compile in a process whose
kernels are interpreted.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
from emulator import TARGETS
from ptx_machine import GLOBAL, Machine
from triton.compiler import ASTSource

import nf4conv
from nf4conv.inference.experts import PackedExperts, decode, product, split_stack, stack_experts
from nf4conv.inference.experts.projection import Projection, project
from nf4conv.inference.kernels.experts import rows as kernels

KINDS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip


def launch(
    programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], *_: Any, **options: Any
) -> None:
    """Stands for `launch_rows`: runs all programs, one after the other."""
    ptx = compiled(arguments, constants, options)
    tensors: dict[int, torch.Tensor] = {}
    buffers: dict[int, np.ndarray] = {}
    parameters = {}
    for place, one in enumerate(flat(arguments)):
        value = one
        if isinstance(one, torch.Tensor):
            tensors[place + 1] = one
            buffers[place + 1] = one.reshape(-1).view(torch.uint8).numpy().copy()
            value = (place + 1) * GLOBAL
        elif isinstance(one, float):
            value = int(np.float32(one).view(np.uint32))
        parameters[f"rows_kernel_param_{place}"] = value
    machine = Machine(ptx, 32 * constants[0].warps, parameters, buffers, programs)
    for program in range(programs):
        machine.run(program)
    out = tensors[4]
    out.copy_(torch.from_numpy(buffers[4]).view(out.dtype).view(out.shape))


def flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Yields arguments, and what records of them hold."""
    for one in arguments:
        if isinstance(one, tuple):
            yield from flat(one)
        else:
            yield one


def kind_of(one: Any) -> Any:
    """Returns how Triton spells the type of an argument."""
    if isinstance(one, tuple):
        return type(one)(*map(kind_of, one))
    if isinstance(one, torch.Tensor):
        return KINDS[one.dtype]
    return "fp32" if isinstance(one, float) else "i32"


def compiled(
    arguments: tuple[Any, ...], constants: tuple[Any, ...], options: dict[str, Any]
) -> str:
    """Compiles rows_kernel for arguments like these, and returns its PTX."""
    names = [parameter.name for parameter in kernels.rows_kernel.params]
    signature = dict(zip(names, map(kind_of, arguments), strict=False))
    signature["SHAPE"] = "constexpr"
    source = ASTSource(
        fn=kernels.rows_kernel, signature=signature, constexprs={"SHAPE": constants[0]}
    )
    options = {
        "num_warps": 8,
        "maxnreg": options["registers"],
        "launch_pdl": options["begins_early"],
        "enable_fp_fusion": False,
    }
    target = TARGETS[options["launch_pdl"]]
    return triton.compile(source, target=target, options=options).asm["ptx"]


def packed(experts: int, rows: int, columns: int, layout: str, kind: str) -> PackedExperts:
    weights = torch.randn(experts, rows, columns) * 0.02
    nested = layout != "not nested"
    if layout == "stacked":
        return split_stack(*nf4conv.quantize_4bit(weights, kind, 64, nested))
    made = [nf4conv.quantize_4bit(matrix, kind, 64, nested) for matrix in weights]
    return stack_experts([codes for codes, _ in made], [state for _, state in made])


def products(x: torch.Tensor, ids: torch.Tensor, stack: PackedExperts) -> torch.Tensor:
    """Multiplies one row of x for each pair, in float64; with 0 where there is no such expert."""
    weights = decode(stack, torch.arange(stack.experts), torch.float32).double()
    rows = []
    for expert, row in zip(ids.view(-1).tolist(), x.double(), strict=True):
        there = expert < stack.experts
        rows.append(weights[expert] @ row if there else weights.new_zeros(stack.rows))
    return torch.stack(rows)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def choose(experts: int, tokens: int, top_k: int) -> torch.Tensor:
    """Chooses experts, one of which does not exist."""
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    ids[0, 0] = experts
    return ids


def check_up(
    rows: int, columns: int, layout: str, kind: str, dtype: torch.dtype, most: float
) -> None:
    """Multiplies with gate and up, for two tokens."""
    gate, up = (packed(4, rows, columns, layout, kind) for _ in range(2))
    ids = choose(4, 2, 2)
    x = torch.randn(2, columns).to(dtype)
    spread = x.repeat_interleave(2, 0)
    of_gate, of_up = products(spread, ids, gate), products(spread, ids, up)
    by_turns = Projection(gate, up, rows, up_column=1, column_step=2)
    found = product.multiply_rows(x, ids, by_turns, None)
    assert error(found, torch.stack([of_gate, of_up], 2).flatten(1)) < most
    found = product.multiply_rows(x, ids, Projection(gate, up, rows, silu=True), None)
    assert error(found, torch.nn.functional.silu(of_gate) * of_up) < most


def check_down(rows: int, columns: int, top_k: int, layout: str, most: float) -> None:
    """Multiplies with all experts of a token, weighted."""
    down = packed(4, rows, columns, layout, "nf4")
    ids = choose(4, 1, top_k)
    x = torch.randn(top_k, columns).bfloat16()
    weights = torch.rand(1, top_k)
    exact = (products(x, ids, down) * weights.view(-1, 1)).sum(0, keepdim=True)
    assert error(product.multiply_rows(x, ids, project(down), weights), exact) < most


if __name__ == "__main__":
    kernels.launch_rows = launch
    torch.manual_seed(0)
    # the result is rounded to bfloat16, or to float16, and so are the 16 values
    product._begins_early = lambda _: True
    product._processors = lambda _: 4
    check_up(40, 192, "packed", "nf4", torch.bfloat16, 3e-3)
    check_up(16, 2112, "stacked", "fp4", torch.float16, 5e-4)  # two stages
    check_down(32, 64, 3, "stacked", 3e-3)
    product._processors = lambda _: 1
    check_down(24, 3136, 3, "packed", 3e-3)  # two stages of three steps
    product._processors = lambda _: 64
    check_down(16, 768, 4, "not nested", 3e-3)  # one unit of one stage
    product._begins_early = lambda _: False
    check_up(24, 192, "packed", "nf4", torch.float16, 5e-4)
    check_down(16, 192, 3, "packed", 3e-3)
    print("as in float64")
