"""Compiles plans without a GPU: what a variant's machine code needs, and its PTX."""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nf4conv.inference.kernels.product.launches import PackedWeight
from nf4conv.inference.kernels.product.panels.kernels import panel_kernel
from nf4conv.inference.kernels.product.panels.plans import Plan
from nf4conv.inference.kernels.product.panels.prepare import MAP_WORDS, TYPES

_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}


class Needs(NamedTuple):
    """What a thread of a kernel needs.

    Attributes:
        registers: at most.
        spilled: bytes of local memory.
    """

    registers: int
    spilled: int


def compiled(plan: Plan, dtype: torch.dtype, capped: bool = True) -> Any:
    """Compiles a plan's kernel for Hopper, with Triton.

    Args:
        plan: with a panel for nested absmax, or a plain one.
        dtype: of x.
        capped: with no more registers than its panel allows; the PTX is the same without.
    """
    panel, cluster, splits = plan
    out = "*fp32" if splits > 1 else _POINTERS[dtype]
    absmax = "*u8" if panel.nested else "*fp32"
    types: dict[str, Any] = {"out_ptr": out, "table_ptr": "*i32", "norm": "fp32"}
    types["weight"] = PackedWeight("*u8", absmax, "*fp32", "*fp32", "*fp32")
    types["x_map"] = ("i64",) * MAP_WORDS
    constants = {"PANEL": panel, "DTYPE": TYPES[dtype], "CLUSTER": cluster}
    signature = {}
    for name in panel_kernel.arg_names:
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
    options: dict[str, Any] = {"num_warps": 4 * panel.groups, "launch_pdl": True}
    options |= {"enable_fp_fusion": False}
    if capped:
        options["maxnreg"] = panel.registers
    source = ASTSource(fn=panel_kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def needs_of(cubin: bytes) -> Needs:
    """Returns what a kernel needs, as cuobjdump says, which Triton brings."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return Needs(found["REG"], found["STACK"] + found["LOCAL"])
