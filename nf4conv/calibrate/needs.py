"""Estimates what a calibration takes: time, memory and disk; and refuses one that has no room.

The constants are measured: on an H200 at the shapes of Llama 8B and 70B, and on CPUs with the small
models of docs/quality.md.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.errors import Nf4convError
from nf4conv.format.units import duration, size
from nf4conv.system.machine import available_memory, resident

_GPU_SECONDS_AT_START: Final = 25.0  # kernels are compiled, and CUDA begins
_GPU_SECONDS_OF_WEIGHT: Final = 10e-9  # to round it
_GPU_SECONDS_OF_WEIGHT_AND_TOKEN: Final = 8e-14

_CPU_OPERATIONS_OF_WEIGHT: Final = 250_000.0
_CPU_OPERATIONS_OF_WEIGHT_AND_TOKEN: Final = 9.5
_PROBE: Final = 1024  # rows and columns of the matrices by which the speed of a CPU is measured
_PROBES: Final = 4  # products of them: on a busy CPU one alone may be lucky

_OUTPUTS: Final = 1.6  # of the time without --calibrate-output

_DEVICE_BYTES: Final = 10**9  # a batch on its way through a block, and what is rounded at a time
_HOST_BYTES: Final = 15 * 10**8  # Python, torch and transformers
_CUDA_BYTES: Final = 7 * 10**8  # of the host


@dataclass(frozen=True)
class Needs:
    """Estimates what a calibration takes.

    Attributes:
        gpu_seconds: time on an H200.
        gpu_bytes: memory of the GPU.
        cpu_seconds: time on the CPU of this machine, as busy as it is.
        cpu_bytes: memory of the host without a GPU, hidden states apart.
        hidden_elements: the number of hidden states that are kept: in memory, and where there is
            too little of it on disk.
        disk_bytes: the most bytes in the output's work folder, hidden states apart.
    """

    gpu_seconds: float
    gpu_bytes: int
    cpu_seconds: float
    cpu_bytes: int
    hidden_elements: int
    disk_bytes: int

    def described(self) -> str:
        """Returns a line for people."""
        return (
            f"calibrating takes about {duration(self.gpu_seconds)} on an H200, with "
            f"{size(self.gpu_bytes)} of its memory; or {duration(self.cpu_seconds)} on this "
            f"machine's CPU, with {size(self.cpu_bytes)} of memory; {size(self.disk_bytes)} of "
            f"disk; and {size(4 * self.hidden_elements)} of either for hidden states"
        )

    def memory_left(self, device: torch.device) -> int:
        """Returns the bytes of host memory that hidden states may take: half of what is left.

        Raises:
            Nf4convError: the device or the host has too little memory for the rest.
        """
        host = self.cpu_bytes
        if device.type == "cuda":
            host = _HOST_BYTES + _CUDA_BYTES
            free, _ = torch.cuda.mem_get_info(device)
            free += torch.cuda.memory_reserved(device)
            if free < self.gpu_bytes:
                raise Nf4convError(
                    f"{device}: calibrating takes about {size(self.gpu_bytes)} of its memory, and "
                    f"{size(free)} are free; a GPU with so much would suffice, and --device cpu "
                    f"takes about {size(self.cpu_bytes)} of host memory"
                )
        available = available_memory() + resident()
        if available < host:
            raise Nf4convError(
                f"calibrating takes about {size(host)} of host memory, and {size(available)} are "
                f"free; so much would suffice"
            )
        return (available - host) // 2


def estimate(
    *,
    blocks: int,
    block_elements: int,
    matrices: Collection[tuple[int, ...]],
    finished_bytes: int,
    tokens: int,
    width: int,
    outputs: str | None,
) -> Needs:
    """Estimates what a calibration takes.

    Args:
        blocks: the number of blocks.
        block_elements: the number of elements of the largest block, or of what is used at one time
            outside the blocks.
        matrices: the shape of each weight that is calibrated, [out, in].
        finished_bytes: the bytes that all weights take in 4 bits.
        tokens: the number of tokens that the model reads.
        width: the number of hidden states of a token.
        outputs: "qkv" or "all", as --calibrate-output has it; None without that option.
    """
    weights = sum(rows * columns for rows, columns in matrices)
    gpu = _GPU_SECONDS_OF_WEIGHT + tokens * _GPU_SECONDS_OF_WEIGHT_AND_TOKEN
    cpu = _CPU_OPERATIONS_OF_WEIGHT + tokens * _CPU_OPERATIONS_OF_WEIGHT_AND_TOKEN
    working = max(_working_bytes(rows, columns) for rows, columns in set(matrices))
    kept = 1
    slower = 1.0
    squares = []  # elements of the second moments of gradients at outputs
    if outputs is not None:
        kept = blocks + 2
        slower = _OUTPUTS
        squares = sorted(rows**2 for rows, _ in matrices)
        if outputs == "qkv":
            # the first weights of a block are its smallest ones, if not by much
            squares = squares[: 4 * blocks]
        working += 24 * squares[-1]
    return Needs(
        gpu_seconds=_GPU_SECONDS_AT_START + slower * weights * gpu,
        gpu_bytes=2 * block_elements + working + _DEVICE_BYTES,
        cpu_seconds=slower * weights * cpu / _speed(),
        cpu_bytes=_HOST_BYTES + 4 * block_elements + working,
        hidden_elements=kept * tokens * width,
        disk_bytes=finished_bytes + 4 * sum(squares),
    )


def _speed() -> float:
    """Returns the operations a second that this machine's CPU has for us now, in float32."""
    matrix = torch.ones((_PROBE, _PROBE))
    torch.mm(matrix, matrix)
    started = time.perf_counter()
    for _ in range(_PROBES):
        torch.mm(matrix, matrix)
    return 2 * float(_PROBE) ** 3 * _PROBES / (time.perf_counter() - started)


def _working_bytes(rows: int, columns: int) -> int:
    """Returns the most bytes that rounding a weight takes."""
    # moments to calibrate and judge by, and a factor in float64
    factoring = 20 * columns**2
    # gate and up are rounded together, and so are queries, keys and values
    rounding = 12 * columns**2 + 32 * rows * columns
    return max(factoring, rounding)
