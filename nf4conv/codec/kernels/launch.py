"""Compiles a kernel once for each variant, then launches it for little more than the driver call.

A `Launcher` keeps what it compiled; calls pass addresses as integers (internals.py). So kernels
must not depend on what Triton would infer from argument values: their pointers and sizes are
declared `do_not_specialize`, and alignment that the host has checked is stated in the kernel.

An argument may be a *record*: a tuple of arguments, which a kernel reads by name if it is named. At
a launch it is a plain tuple of addresses and numbers, which costs the launcher nothing; where
`__call__` is given a record of tensors, its method `addresses` makes that tuple.
"""

import ctypes
import functools
import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl

from nf4conv.codec.kernels.internals import (
    CannotLaunchError,
    Launch,
    enlarge,
    example_of,
    launch_as_triton_does,
    like,
    prepare_launch,
    stream_of,
)
from nf4conv.system.machine import cuda_driver

_first_call = threading.Lock()


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
    Its parameters are pointers, named …_ptr, sizes, records, and constexprs.
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
        self._compiled: dict[Hashable, Launch] = {}  # by device, variant, warps and constexprs

    def __call__(
        self,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Hashable, ...],
        variant: Hashable,
        num_warps: int,
        registers: int | None = None,
        begins_early: bool = False,
    ) -> None:
        """Launches on the current stream of the device of the first argument, a tensor.

        `arguments` are tensors, numbers and records, in the kernel's order; `programs` is the grid.
        `prepare` describes the others.
        """
        device = arguments[0].device
        if device.type != "cuda":
            self.kernel[(programs,)](*arguments, *constants)  # Triton's interpreter
            return
        launch = self._compiled.get((device.index, variant, num_warps, constants))
        if launch is None:
            kinds = _kinds(arguments)
            launch = self.prepare(
                device, kinds, constants, variant, num_warps, registers, begins_early
            )
        addresses = _addresses(arguments)
        if torch.cuda.current_device() == device.index:
            launch(programs, stream_of(device)(), *addresses)
            return
        with torch.cuda.device(device):
            launch(programs, stream_of(device)(), *addresses)

    def prepare(
        self,
        device: torch.device,
        arguments: tuple[Any, ...],
        constants: tuple[Hashable, ...],
        variant: Hashable,
        num_warps: int,
        registers: int | None = None,
        begins_early: bool = False,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> Launch:
        """Compiles without a launch, and returns the fastest way to launch.

        Args:
            device: a GPU.
            arguments: the dtypes of the tensors, and any numbers, in the kernel's order; records of
                these, in which a number from 2^31 on stands for 64 bits.
            constants: the constexprs, in the kernel's order.
            variant: whatever else decides the compilation: the dtypes of the arguments.
            num_warps: warps of 32 threads of each program.
            registers: the most registers of a thread; by default the compiler decides.
            begins_early: True if the kernel may begin before its predecessor has ended, and waits
                where it must.
            shared_bytes: shared memory for assembly; Triton must not know of any in this kernel.
            cluster: programs that run together and reach each other's shared memory. Triton does
                not know of it: the kernel is compiled for one. It belongs to the constexprs.

        Returns:
            A function that launches on the current device, which must be this one. It takes the
            number of programs, or of clusters, the stream, and the run-time arguments: addresses
            and numbers, and tuples of these for records.

        Raises:
            CannotLaunchError: this Triton is too new to launch with `shared_bytes` or in a cluster.
        """
        key = (device.index, variant, num_warps, constants)
        launch = self._compiled.get(key)
        if launch is not None:
            return launch
        options = {
            "num_warps": num_warps,
            "maxnreg": registers,
            "launch_pdl": begins_early,
            "enable_fp_fusion": False,  # a product and a sum are rounded apart
        }
        # Triton compiles in one thread at a time
        with torch.cuda.device(device), _first_call, outside_of_graphs():
            examples = [example_of(one) for one in arguments]
            compiled = self.kernel.warmup(*examples, *constants, grid=(1,), **options)
            if shared_bytes > 0:
                enlarge(compiled, shared_bytes)
            _ = compiled.run  # loads the machine code
            launch = prepare_launch(compiled, constants, cluster, begins_early)
        if launch is None:
            if shared_bytes > 0 or cluster > 1:
                raise CannotLaunchError
            launch = launch_as_triton_does(self.kernel, arguments, constants, options)
        self._compiled[key] = launch
        return launch


def _kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what `prepare` takes for arguments."""
    kinds: list[Any] = []
    for one in arguments:
        if isinstance(one, tuple):
            kinds.append(like(one, _kinds(one)))
        else:
            kinds.append(one if isinstance(one, (int, float)) else one.dtype)
    return tuple(kinds)


_NUMBERS: Final = frozenset((int, float))


def _addresses(arguments: tuple[Any, ...]) -> list[Any]:
    """Returns arguments as the driver takes them: the addresses of tensors, and numbers.

    Asks for types, not isinstance, which takes twice as long for tensors.
    """
    found: list[Any] = []
    for one in arguments:
        kind = type(one)
        if kind in _NUMBERS:
            found.append(one)
        else:
            found.append(one.addresses() if issubclass(kind, tuple) else one.data_ptr())
    return found


# A CUDA graph is often captured before anything has run. Tables and kernels that are then needed
# for the first time must not become part of it: it may not record that they are made and loaded.

_RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: this thread may allocate while a stream is captured."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextmanager
def outside_of_graphs() -> Iterator[None]:
    """Lets this thread allocate, copy and load kernels, though its stream may be captured.

    Kernels that are launched inside run at once, on a stream of their own. Await them there.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        yield
        return
    exchange = cuda_driver().cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # `mode` now holds the one before
    try:
        # torch gives memory of a graph's pool to the stream that is captured, and to no other
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    finally:
        exchange(ctypes.byref(mode))


def kept(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a function that makes a table: what it returns is kept, and belongs to no graph."""

    @functools.cache
    @functools.wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # what is made in inference mode could not be trained with later
        with outside_of_graphs(), torch.inference_mode(mode=False):
            return make(*args, **kwargs)

    return made  # type: ignore[return-value]
