"""Compiles a kernel once for each variant, then launches it for little more than the driver call.

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
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from nf4conv.codec.kernels.capturing import outside_of_graphs

_first_call = threading.Lock()  # Triton compiles in one thread at a time


def _find_triton_a_folder() -> None:
    """Gives Triton a temporary cache if the user's home cannot be written to.

    Triton keeps what it compiles at home, and fails for users without one: in containers that run
    under a user number without a name.
    """
    if "TRITON_HOME" in os.environ or "TRITON_CACHE_DIR" in os.environ:
        return
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - pathlib raises where there is none
    folder = home / ".triton"
    if not folder.exists():
        folder = home
    if not os.access(folder, os.W_OK):
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="nf4conv-triton-")


_find_triton_a_folder()


def kernel(function: Any) -> Any:
    """Decorates a kernel for a Launcher: `triton.jit`, but only constexprs decide the compilation.

    Args:
        function: its parameters are pointers, named …_ptr, sizes, and constexprs.
    """
    pointers = []
    sizes = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation is tl.constexpr:
            continue
        if parameter.name.endswith("_ptr"):
            pointers.append(parameter.name)
        else:
            sizes.append(parameter.name)
    return triton.jit(function, do_not_specialize=sizes, do_not_specialize_on_alignment=pointers)


class Launcher:
    """Launches one `@kernel` and keeps what it was compiled to.

    The kernel's parameters are run-time arguments first, then constexprs.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Any] = {}  # by device, variant, warps and constexprs

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
        """Launches on the current stream of the first argument's device.

        Args:
            programs: the number of programs: the grid.
            arguments: tensors and numbers, in the kernel's order; the first is a tensor.
            constants: the constexprs, in the kernel's order.
            variant: whatever else decides the compilation: the dtypes of the arguments.
            num_warps: warps of 32 threads of each program.
            registers: the most registers of a thread; by default the compiler decides.
            begins_early: True if the kernel may begin before its predecessor has ended, and waits
                where it must.

        Returns:
            What was compiled: Triton's kernel, or None from the interpreter.
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
        if compiled is None:
            compiled = self._compile(key, arguments, registers, begins_early)
        _run(compiled, programs, device, arguments, constants)
        return compiled

    def prepare(
        self,
        device: torch.device,
        arguments: tuple[torch.dtype | float, ...],
        constants: tuple[Hashable, ...],
        variant: Hashable,
        num_warps: int,
        registers: int | None = None,
        begins_early: bool = False,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> Callable[..., None]:
        """Compiles without a launch, and returns the fastest way to launch.

        Args:
            device: a GPU.
            arguments: the dtypes of the tensors, and any numbers, in the kernel's order.
            constants: the constexprs, in the kernel's order.
            variant: whatever else decides the compilation: the dtypes of the arguments.
            num_warps: warps of 32 threads of each program.
            registers: the most registers of a thread; by default the compiler decides.
            begins_early: True if the kernel may begin before its predecessor has ended, and waits
                where it must.
            shared_bytes: shared memory for assembly; Triton must not know of any in this kernel.
            cluster: programs that run together and reach each other's shared memory. Triton does
                not know of it: the kernel is compiled for one.

        Returns:
            A function that launches on the current device, which must be this one. It takes the
            number of programs, or of clusters, the stream, and the run-time arguments: addresses
            and numbers.
        """
        key = (device.index, variant, num_warps, constants)
        compiled = self._compiled.get(key)
        if compiled is None:
            with torch.cuda.device(device):
                compiled = self._compile(key, arguments, registers, begins_early, shared_bytes)
        function = compiled.function
        metadata = _packed(compiled, cluster)
        # what is launched, for the hooks, and the hooks before and behind a launch
        behind: tuple[Any, ...] = (metadata, None, None, None)
        run = _direct(compiled.run)
        if run is not None:
            launcher = compiled.run
            behind = (launcher.launch_cooperative_grid, begins_early, None, None, *behind)
        else:
            run = compiled.run

        def launch(programs: int, stream: int, *arguments: float) -> None:
            run(programs, 1, 1, stream, function, *behind, *arguments, *constants)

        return launch

    def _compile(
        self,
        key: tuple[int, Hashable, int, tuple[Hashable, ...]],
        arguments: tuple[Any, ...],
        registers: int | None,
        begins_early: bool,
        shared_bytes: int = 0,
    ) -> Any:
        """Compiles a variant for the current device, and loads it; keeps it under its key."""
        _, _, num_warps, constants = key
        with _first_call, outside_of_graphs():
            compiled = self.kernel.warmup(
                *arguments,
                *constants,
                grid=(1,),
                num_warps=num_warps,
                maxnreg=registers,
                launch_pdl=begins_early,
                enable_fp_fusion=False,  # a product and a sum are rounded apart
            )
            if shared_bytes > 0:
                _enlarge(compiled, shared_bytes)
            _ = compiled.run  # loads the machine code
            self._compiled[key] = compiled
        return compiled


def _enlarge(compiled: Any, shared_bytes: int) -> None:
    """Lets a kernel that is not loaded yet have shared memory that Triton does not ask for."""
    compiled.metadata = compiled.metadata._replace(shared=shared_bytes)


def _packed(compiled: Any, cluster: int) -> Any:
    """Returns what Triton's launcher is told of a kernel, which may have been enlarged."""
    metadata = compiled.metadata
    if cluster > 1:
        metadata = metadata._replace(num_ctas=cluster)
        if hasattr(metadata, "cluster_dims"):
            metadata = metadata._replace(cluster_dims=(cluster, 1, 1))
    return make_backend(metadata.target).pack_metadata(metadata)


def _direct(launcher: Any) -> Any:
    """Returns what a launcher of Triton calls in C, if that is known; None otherwise.

    What stands between allocates memory that none of our kernels asks for, and takes a microsecond.
    """
    if not triton.__version__.startswith("3.6."):
        return None
    if launcher.global_scratch_size > 0 or launcher.profile_scratch_size > 0:
        return None
    return launcher.launch


def _addresses(arguments: tuple[torch.Tensor | float, ...]) -> list[float]:
    """Returns arguments as the driver takes them: the addresses of tensors, and numbers."""
    return [one if isinstance(one, (int, float)) else one.data_ptr() for one in arguments]


def _run(
    compiled: Any,
    programs: int,
    device: int,
    arguments: tuple[torch.Tensor | float, ...],
    others: tuple[Any, ...],
) -> None:
    """Calls Triton's C launcher; `others`, behind the arguments, are addresses and numbers."""
    stream = driver.active.get_current_stream(device)
    compiled.run(
        programs,
        1,
        1,
        stream,
        compiled.function,
        compiled.packed_metadata,
        None,  # what is launched, for the hooks
        None,  # the hook before a launch
        None,  # the hook behind it
        *_addresses(arguments),
        *others,
    )
