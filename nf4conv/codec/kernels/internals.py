"""Lists what we use of Triton beside its language; no other module imports Triton's internals.

compile_ahead    compiles for a GPU that need not be there, for programs without torch and Triton
prepare_launch   launches for little more than the driver call; Triton's own launch inspects every
                 argument at every call, about 10 µs for a dozen of them
stream_of        asks for the current stream in less time than torch.cuda.current_stream() takes

Written for Triton 3.5 to 3.9. Where a newer one lacks what `prepare_launch` needs, kernels are
launched as Triton does, and those that Triton's launch cannot start are not used.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.compiler.compiler import make_backend
from triton.runtime import driver

Launch = Callable[..., None]
"""Launches on the current device: programs or clusters, stream, run-time arguments."""


class CannotLaunchError(Exception):
    """This Triton cannot launch a kernel whose shared memory or cluster it does not know of."""


def stream_of(device: torch.device) -> Callable[[], int]:
    """Returns a function that returns the device's current stream."""
    return partial(driver.active.get_current_stream, device.index)


def compile_ahead(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[tuple[int, ...], Any],
    capability: tuple[int, int],
    num_warps: int,
) -> Any:
    """Compiles a kernel for a compute capability, such as (9, 0); returns Triton's CompiledKernel.
    `types` has those of all parameters by their names, as Triton spells them; `constants` the
    constexprs by their places.
    """
    major, minor = capability
    return compile_source(
        ASTSource(kernel, types, constants, {}),
        target=GPUTarget("cuda", 10 * major + minor, 32),
        options={"num_warps": num_warps, "enable_fp_fusion": False},
    )


def enlarge(compiled: Any, shared_bytes: int) -> None:
    """Lets a kernel that is not loaded yet have shared memory that Triton does not ask for."""
    if not hasattr(compiled.metadata, "_replace"):
        raise CannotLaunchError
    compiled.metadata = compiled.metadata._replace(shared=shared_bytes)


def prepare_launch(
    compiled: Any, constants: tuple[Any, ...], cluster: int, begins_early: bool
) -> Launch | None:
    """Returns the fastest way to launch a kernel that is loaded; None if this Triton is not as it
    must be. Triton does not know of a cluster of several programs.
    """
    try:
        run, function, metadata = compiled.run, compiled.function, _metadata_of(compiled, cluster)
    except AttributeError:
        return None
    # what is launched, for the hooks, and the hooks before and behind a launch
    behind: tuple[Any, ...] = (metadata, None, None, None)
    direct = _direct(run)
    if direct is not None:
        behind = (run.launch_cooperative_grid, begins_early, None, None, *behind)
        run = direct

    def launch(programs: int, stream: int, *arguments: Any) -> None:
        run(programs, 1, 1, stream, function, *behind, *arguments, *constants)

    return launch


def _metadata_of(compiled: Any, cluster: int) -> Any:
    """Returns what Triton's launcher is told of a kernel, which may have been enlarged."""
    metadata = compiled.metadata
    if cluster > 1:
        metadata = metadata._replace(num_ctas=cluster)
        if hasattr(metadata, "cluster_dims"):
            metadata = metadata._replace(cluster_dims=(cluster, 1, 1))
    return make_backend(metadata.target).pack_metadata(metadata)


def _direct(launcher: Any) -> Any:
    """Returns what a launcher of Triton 3.6 calls in C; None for other releases.

    Triton's own code between the two allocates memory that none of our kernels asks for, and takes
    a microsecond.
    """
    if not triton.__version__.startswith("3.6."):
        return None
    if launcher.global_scratch_size > 0 or launcher.profile_scratch_size > 0:
        return None
    return launcher.launch


class _Pointer:
    """An address with the dtype of what it points to: a tensor, to Triton's own launch."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


def like(record: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns other values with the names of a record."""
    if hasattr(record, "_fields"):
        return type(record)(*values)
    return tuple(values)


def example_of(kind: Any) -> Any:
    """Returns an argument of a kind, from which Triton infers its type and nothing else.

    `do_not_specialize` does not reach what is in a record: 1 would become a constant, and a
    multiple of 16 would be known as one.
    """
    if not isinstance(kind, tuple):
        return kind
    examples: list[Any] = []
    for one in kind:
        if isinstance(one, torch.dtype):
            examples.append(_Pointer(1, one))
        elif isinstance(one, int):
            examples.append(3 if one < 1 << 31 else (1 << 40) + 3)
        else:
            examples.append(example_of(one))
    return like(kind, examples)


def launch_as_triton_does(
    kernel: Any, kinds: tuple[Any, ...], constants: tuple[Any, ...], options: Mapping[str, Any]
) -> Launch:
    """Returns Triton's own launch, which compiles again unless its cache has the kernel.

    `kinds` has for each run-time argument the dtype that it points to, any number, or a record.
    """

    def launch(programs: int, _stream: int, *arguments: Any) -> None:
        kernel[(programs,)](*_given(arguments, kinds), *constants, **options)

    return launch


def _given(arguments: tuple[Any, ...], kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments as Triton's own launch takes them."""
    given: list[Any] = []
    for argument, kind in zip(arguments, kinds, strict=True):
        if isinstance(kind, torch.dtype):
            given.append(_Pointer(argument, kind))
        else:
            given.append(_given(argument, kind) if isinstance(kind, tuple) else argument)
    return like(kinds, given)
