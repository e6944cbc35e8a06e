"""The kernels of products compile for every GPU that they claim, by ptxas, which needs no GPU."""

import pytest
from own_process import compiles, run_compiling

SOURCE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nf4conv.inference.kernels.product.launches import PackedWeight
from nf4conv.inference.kernels.product import held, kernel, shapes

capability = int(sys.argv[1])
WEIGHT = PackedWeight("*u8", "*u8", "*fp32", "*fp32", "*fp32")
FIRST = ["*bf16", "*fp32", WEIGHT, "*i32"]


def compile(function, constants, options):
    runtime = [name for name in function.arg_names if name not in constants]
    signature = dict.fromkeys(function.arg_names, "constexpr")
    for place, name in enumerate(runtime):
        signature[name] = FIRST[place] if place < len(FIRST) else "i32"
    if "norm" in signature:
        signature["norm"] = "fp32"
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(
        source, target=target, options={"enable_fp_fusion": False, **options}
    )
    assert compiled.asm["cubin"]
    print(function.__name__, constants, compiled.metadata.shared)


for rows, n, k in ((1, 8, 4096), (1, 8192, 4096), (1, 8192, 5120), (8, 8, 4096), (64, 8, 4096)):
    shape = shapes.shape_for(rows, n, k, nested=True, early=capability == 90)
    options = {"num_warps": shape.warps, "maxnreg": shape.registers, "launch_pdl": capability == 90}
    function = held.held_kernel if isinstance(shape, shapes.Held) else kernel.product_kernel
    compile(function, {"SHAPE": shape}, options)
"""


@compiles
@pytest.mark.parametrize(
    "capability",
    [
        80,
        90,
        120,
        *(pytest.param(n, marks=pytest.mark.architectures) for n in (86, 89, 100, 103)),
    ],
)
def test_compiles_for(capability: int) -> None:
    """In a process of its own: Triton cannot compile where kernels are interpreted."""
    done = run_compiling("-c", SOURCE, capability)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 5
