"""Compiles panels for Hopper without a GPU, and says what their machine code needs."""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nf4conv.inference.kernels.product.launches import PackedWeight
from nf4conv.inference.kernels.product.panels.kernels import panel_kernel
from nf4conv.inference.kernels.product.panels.plans import PANELS, Plan
from nf4conv.inference.kernels.product.panels.prepare import MAP_WORDS, TYPES

_POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def spilled(cluster: int) -> list[str]:
    """Returns the panels whose kernels keep registers in memory, in clusters of a size."""
    found = []
    for panel in PANELS:
        for dtype in TYPES:
            plan = Plan(panel, cluster, 1)
            if local_bytes(compiled(plan, dtype).asm["cubin"]):
                found.append(f"{plan} {dtype}")
    return found


def compiled(plan: Plan, dtype: torch.dtype) -> Any:
    """Compiles a plan's kernel for an x of some dtype."""
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
    options |= {"enable_fp_fusion": False, "maxnreg": panel.registers}
    source = ASTSource(fn=panel_kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def local_bytes(cubin: bytes) -> int:
    """Returns the local memory of a thread, as cuobjdump says, which Triton brings."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(value) for value in re.findall(r"(?:STACK|LOCAL):(\d+)", told))
