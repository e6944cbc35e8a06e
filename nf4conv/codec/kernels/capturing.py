"""Does what a CUDA graph may not record: allocates what is kept, and loads machine code.

A graph is often captured before anything has run. Tables and kernels that are then needed for the
first time must not become part of it.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec, TypeVar

import torch

from nf4conv.system.machine import cuda_driver

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
