"""Compiles kernels with torch and Triton, once for a GPU.

torch is imported only when there is something to compile.
"""

import base64
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from nf4conv.run.device.on_driver.driver import CudaError, Device, Function, Stream
from nf4conv.run.device.on_driver.kernels import Purpose, load_kernels


def compile_kernels(
    gpu: Device, capability: tuple[int, int], purposes: Sequence[Purpose]
) -> dict[Purpose, dict[str, Any]] | None:
    """Compiles kernels.

    Args:
        gpu: what they run on; it becomes the thread's current device.
        capability: its compute capability.
        purposes: what the kernels are for.

    Returns:
        Kernels, tables and numbers by purpose, as JSON. None if torch has no CUDA here, if the GPU
        is too old, or if torch takes means in an order that our kernels do not repeat.
    """
    meanwhile = threading.Thread(target=_prepare, args=(gpu,))
    meanwhile.start()
    import torch

    from nf4conv.codec import backends, reference  # importing torch takes seconds

    meanwhile.join()
    gpu.use()
    device = torch.device("cuda", gpu.ordinal)
    if not torch.cuda.is_available() or backends.backend(device) is reference:
        return None
    with torch.cuda.device(device):
        contents = _compiled(device, capability, purposes)
        return contents if _repeats_torch(device, contents) else None


def _compiled(
    device: Any, capability: tuple[int, int], purposes: Sequence[Purpose]
) -> dict[Purpose, dict[str, Any]]:
    from nf4conv.codec.kernels.compiling import compile_kernels  # importing torch takes seconds

    codecs = {purpose: make_codec(device, purpose) for purpose in purposes}
    variants = []
    for codec in codecs.values():
        variants += codec.kernels.values()
    compiled = iter(compile_kernels(variants, capability))
    contents = {}
    for purpose, codec in codecs.items():
        kernels = {name: next(compiled) for name in codec.kernels}
        tables = {}
        for name, table in codec.tables.items():
            tables[name] = base64.b64encode(table).decode()
        contents[purpose] = {"kernels": kernels, "tables": tables, "numbers": codec.numbers}
    return contents


def _repeats_torch(device: Any, contents: Mapping[Purpose, dict[str, Any]]) -> bool:
    """Returns True if compiled kernels that pack take means as torch does; tries one purpose."""
    import torch

    from nf4conv.codec.kernels.packing import mean  # importing torch takes seconds

    for purpose, content in contents.items():
        if purpose.maker == "encoder":
            stream = Stream(torch.cuda.current_stream().cuda_stream)
            functions = load_kernels(content).functions
            return bool(mean.repeats_torch(device, partial(_launch, functions, stream)))
    return True


def _launch(
    functions: Mapping[str, Function],
    stream: Stream,
    name: str,
    programs: int,
    arguments: Sequence[Any],
) -> None:
    """Launches a kernel on tensors and numbers.

    Triton, which could do it, needs a C compiler for that.
    """
    values = [value if isinstance(value, int) else value.data_ptr() for value in arguments]
    functions[name].launch(stream, programs, values)


def _prepare(gpu: Device) -> None:
    """Does meanwhile what does not need torch.

    It makes a context; and it has Triton hash itself, which is half a gigabyte.
    """
    # torch's CPU build brings no Triton; an error of the driver is met again
    with suppress(ImportError, CudaError):
        gpu.use()
        from triton.runtime.cache import triton_key

        triton_key()


def make_codec(device: Any, purpose: Purpose) -> Any:
    """Returns the kernels for a purpose, not compiled yet: a codec.kernels.ahead.Codec."""
    from nf4conv.codec.kernels import ahead  # importing torch takes seconds
    from nf4conv.codec.quant_state import DTYPES  # importing torch takes seconds
    from nf4conv.run.device.on_torch.reading import TORCH_DTYPES  # importing torch takes seconds

    dtypes = TORCH_DTYPES | DTYPES

    def of_torch(detail: Any) -> Any:
        return dtypes.get(detail, detail) if isinstance(detail, str) else detail

    make = getattr(ahead, purpose.maker)
    return make(device, *map(of_torch, purpose.details))
