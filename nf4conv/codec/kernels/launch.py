"""Compile a kernel once for each variant, then launch it for little more than the driver call.

Triton's own `kernel[grid](...)` inspects every argument at every call, about 10 µs for a dozen of
them. A `Launcher` does that for the first call of a variant and keeps what it compiled; later calls
pass addresses as integers straight to Triton's C launcher. So kernels must not depend on what
Triton would infer from argument values: their pointers and sizes are declared `do_not_specialize`,
and alignment that the host has checked is stated in the kernel.
"""

import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

_first_call = threading.Lock()


def _find_triton_a_folder() -> None:
    """Triton keeps what it compiles at home, and fails for users without one: in containers that
    run under a number.
    """
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - pathlib raises where there is none
    kept = home / ".triton"
    is_told = "TRITON_HOME" in os.environ or "TRITON_CACHE_DIR" in os.environ
    if not is_told and not os.access(kept if kept.exists() else home, os.W_OK):
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="nf4conv-triton-")


_find_triton_a_folder()


def kernel(function: Any) -> Any:
    """`triton.jit` for what a Launcher launches: only constexprs decide the compilation. Pointers
    are named …_ptr.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    pointers = [name for name in names if name.endswith("_ptr")]
    sizes = [name for name in names if name not in pointers]
    return triton.jit(function, do_not_specialize=sizes, do_not_specialize_on_alignment=pointers)


class Launcher:
    """One `@kernel`, whose parameters are run-time arguments first, then constexprs, and what it
    was compiled to.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Hashable, ...],
        variant: Hashable,
        num_warps: int,
        registers: int | None = None,
        begins_early: bool = False,
    ) -> Any:
        """Launch on the current stream of the first argument's device; return what was compiled.

        Args:
            programs: grid size.
            arguments: tensors and numbers, in the kernel's order; the first is a tensor.
            constants: the constexprs, in the kernel's order.
            variant: whatever else decides the compilation: the dtypes of the arguments.
            num_warps: of 32 threads, for each program.
            registers: at most, for each thread; by default what the compiler likes.
            begins_early: whether the kernel may begin before its predecessor has ended, and waits
                where it must.
        """
        first = arguments[0]
        if first.device.type != "cuda":
            return self.kernel[(programs,)](*arguments, *constants)  # Triton's interpreter
        device = first.device.index
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self(
                    programs, arguments, constants, variant, num_warps, registers, begins_early
                )
        key = (device, variant, num_warps, constants)
        compiled = self._compiled.get(key)
        if compiled is not None:
            _run(compiled, programs, device, arguments, constants)
            return compiled
        with _first_call:
            options = {"num_warps": num_warps, "maxnreg": registers, "launch_pdl": begins_early}
            compiled = self.kernel[(programs,)](
                *arguments, *constants, enable_fp_fusion=False, **options
            )
            self._compiled[key] = compiled
            return compiled

    def fixed(
        self, programs: int, arguments: tuple[torch.Tensor | float, ...], *options: Any
    ) -> Callable[..., None]:
        """A launch that takes less time: a function of the first tensors; `arguments` are the
        others, and never change.

        The options are those of `__call__`, behind `arguments`.
        """
        kept = (
            *[one if isinstance(one, (int, float)) else one.data_ptr() for one in arguments],
            *options[0],
        )
        compiled: dict[int, Any] = {}  # by device

        def launch(*tensors: torch.Tensor) -> None:
            device = torch.cuda.current_device()
            if device in compiled:
                _run(compiled[device], programs, device, tensors, kept)
            else:
                compiled[tensors[0].device.index] = self(programs, (*tensors, *arguments), *options)

        return launch


def _run(
    compiled: Any, programs: int, device: int, arguments: tuple[Any, ...], others: tuple[Any, ...]
) -> None:
    addresses = [one if isinstance(one, (int, float)) else one.data_ptr() for one in arguments]
    stream = driver.active.get_current_stream(device)
    compiled.run(
        *(
            programs,
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *addresses,
            *others,
        )
    )
