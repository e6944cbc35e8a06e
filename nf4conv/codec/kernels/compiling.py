"""Compiles kernels to machine code, without launching them and without a GPU."""

import base64
import multiprocessing
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch

from nf4conv.codec.kernels.internals import compile_ahead
from nf4conv.system.machine import CAN_FORK, usable_cores
from nf4conv.system.signals import end_when_stopped

_LONGEST: Final = 30
"""Seconds to wait for a kernel from another process before this one compiles what is missing."""


class Variant(NamedTuple):
    """A kernel that is to be compiled. Its parameters are pointers, 64-bit numbers, constexprs."""

    kernel: Any
    pointers: tuple[torch.dtype, ...]  # what they point to
    constants: tuple[Hashable, ...]
    num_warps: int


_waiting: list[Variant] = []
"""The kernels that forked processes are to compile: they find them here, and need no pickle."""


def compile_kernels(
    variants: Sequence[Variant], capability: tuple[int, int]
) -> list[dict[str, Any]]:
    """Compiles kernels for a compute capability, in as many processes as there are cores: Triton
    holds the interpreter's lock meanwhile.

    Returns for each kernel "cubin", the machine code in base64; "entry", its name in there;
    "shared", bytes of shared memory of each program; and "threads" of each program.
    """
    _waiting[:] = variants
    tasks = [(number, capability) for number in range(len(variants))]
    if not CAN_FORK:
        return [_compile(task) for task in tasks]
    processes = min(len(tasks), len(usable_cores()))
    # a process that is ended, with all its work done, is not to tell the user that it was stopped
    with multiprocessing.get_context("fork").Pool(processes, end_when_stopped) as pool:
        found: list[dict[str, Any]] = []
        # no answer from a process that died, or for which another thread of ours held a lock
        with suppress(multiprocessing.TimeoutError):
            results = pool.imap(_compile, tasks)
            while len(found) < len(tasks):
                found.append(results.next(_LONGEST))
    return found + [_compile(task) for task in tasks[len(found) :]]


def _compile(task: tuple[int, tuple[int, int]]) -> dict[str, Any]:
    """Compiles a kernel of `_waiting`, given its number and the compute capability."""
    number, capability = task
    variant = _waiting[number]
    names = variant.kernel.arg_names
    first = len(names) - len(variant.constants)
    types = dict.fromkeys(names[:first], "i64") | dict.fromkeys(names[first:], "constexpr")
    for name, dtype in zip(names, variant.pointers, strict=False):
        types[name] = _POINTERS[dtype]
    constants: dict[tuple[int, ...], Hashable] = {}
    for place, constant in enumerate(variant.constants):
        constants[(first + place,)] = constant
    found = compile_ahead(variant.kernel, types, constants, capability, variant.num_warps)
    return {
        "cubin": base64.b64encode(found.asm["cubin"]).decode(),
        "entry": found.metadata.name,
        "shared": found.metadata.shared,
        "threads": 32 * variant.num_warps,
    }


_POINTERS: Final = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
"""Triton's names of pointers to these."""
