"""The kernels compile for a Hopper GPU with the installed Triton, and to the memory accesses they
were designed for.

No GPU is needed to compile, but the interpreter must be off, so a fresh process does it.
"""

import json
import os
import signal
import time
from typing import Any

import pytest
from own_process import run_compiling

from nf4conv.codec.kernels import compiling

PROGRAM = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nf4conv.codec.kernels import error
from nf4conv.codec.kernels.decoding import dequantize
from nf4conv.codec.kernels.packing import mean, nested, pack, quantize

P = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
STATE = dict(
    absmax_ptr="*u8", nested_code_ptr="*fp32", nested_absmax_ptr="*fp32", offset_ptr="*fp32"
)
OPEN = dict(BLOCKSIZE=64, PTX=True)

def build(kernel, types, constants, warps):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(kernel, signature, values, {})
    target = GPUTarget("cuda", 90, 32)
    built = triton.compile(
        source, target=target, options={"num_warps": warps, "enable_fp_fusion": False}
    )
    return {"ptx": built.asm["ptx"], "shared": built.metadata.shared}

found = {}
for name, pointer in P.items():
    size = 4 if name == "fp32" else 2
    slots, warps = quantize.CONFIGURATIONS[size]
    types = dict(
        weight_ptr=pointer, packed_ptr="*u8", scales_ptr="*fp32", table_ptr="*i32", n="i64"
    )
    constants = dict(TILE=slots * 16 // size, IS_FP4=name == "fp16", ACCESS=0, SEARCH=False) | OPEN
    found["quantize-" + name] = build(pack.quantize_kernel, types, constants, warps)
    slots, warps = dequantize.CONFIGURATIONS[size]
    types = dict(packed_ptr="*u8", table_ptr="*i32", out_ptr=pointer, n="i64") | STATE
    constants = dict(TILE=slots * 16 // size, ACCESS=0, STREAM=True) | OPEN
    found["dequantize-" + name] = build(dequantize.dequantize_kernel, types, constants, warps)
types = dict(table_ptr="*i64", means_ptr="*fp32", tensors="i64")
found["mean"] = build(mean.mean_kernel, types, {}, 4)
types = dict(table_ptr="*i64", example_ptr="*bf16", code_ptr="*i32", tensors="i64")
constants = dict(TILE=4096, IS_FP4=True, ACCESS=1, SEARCH=False) | OPEN
found["batch"] = build(pack.quantize_batch_kernel, types, constants, 4)
constants = dict(TILE=2048, IS_FP4=False, ACCESS=1, SEARCH=True) | OPEN
found["search"] = build(pack.quantize_batch_kernel, types, constants, 4)
types = dict(table_ptr="*i64", means_ptr="*fp32", middle_ptr="*fp32", tensors="i64")
found["nested"] = build(nested.compress_batch_kernel, types, dict(PTX=True), nested.NUM_WARPS)
types = dict(
    weight_ptr="*bf16", packed_ptr="*u8", value_ptr="*i32", bound_ptr="*i32",
    peaks_ptr="*fp32", squares_ptr="*fp64", outside_ptr="*i64", n="i64", programs="i64",
) | STATE
found["error"] = build(error.error_kernel, types, dict(TILE=2048, ACCESS=0) | OPEN, 4)
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, object]]:
    result = run_compiling("-c", PROGRAM)
    assert result.returncode == 0, result.stderr[-2000:]
    found: dict[str, dict[str, object]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_dequantize_stores_sixteen_bytes_a_thread_without_an_exchange(
    compiled: dict[str, dict[str, object]], dtype: str
) -> None:
    kernel = compiled[f"dequantize-{dtype}"]
    stores = [line for line in str(kernel["ptx"]).splitlines() if "st.global" in line]
    assert stores
    assert all("v4.b32" in line for line in stores)
    assert kernel["shared"] == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_quantize_loads_sixteen_bytes_a_thread(
    compiled: dict[str, dict[str, object]], dtype: str
) -> None:
    ptx = str(compiled[f"quantize-{dtype}"]["ptx"])
    assert "v4.b32" in "".join(line for line in ptx.splitlines() if "ld.global" in line)
    assert "rcp.approx.ftz.f32" in ptx


def test_search_keeps_the_layout_of_its_load(compiled: dict[str, dict[str, object]]) -> None:
    """16 bytes a thread are eight neighbours of one group; another layout would be exchanged in
    shared memory.
    """
    ptx = str(compiled["search"]["ptx"])
    assert "v4.b32" in "".join(line for line in ptx.splitlines() if "ld.global" in line)
    assert "min.f16x2" in ptx
    assert int(str(compiled["search"]["shared"])) <= 1024


def test_no_product_is_contracted_with_a_sum(compiled: dict[str, dict[str, object]]) -> None:
    for name in ("dequantize-bf16", "nested", "mean", "search"):
        assert "fma.rn.f32" not in str(compiled[name]["ptx"]), name


HERE = os.getpid()


def hang(task: tuple[int, Any]) -> int:
    if task[0] == 1 and os.getpid() != HERE:
        time.sleep(60)
    return task[0]


def die(task: tuple[int, Any]) -> int:
    if task[0] == 1 and os.getpid() != HERE:
        os.kill(os.getpid(), signal.SIGKILL)
    return task[0]


@pytest.mark.parametrize("compile_one", [hang, die])
def test_what_another_process_does_not_compile_this_one_does(
    monkeypatch: pytest.MonkeyPatch, compile_one: Any
) -> None:
    monkeypatch.setattr(compiling, "_LONGEST", 0.5)
    monkeypatch.setattr(compiling, "_compile", compile_one)
    monkeypatch.setattr(compiling, "usable_cores", lambda: [0, 1])
    variants: Any = [None] * 4
    start = time.monotonic()
    found: Any = compiling.compile_kernels(variants, (9, 0))
    assert found == [0, 1, 2, 3]
    assert time.monotonic() - start < 30
