"""Estimates what a calibration takes: time, memory and disk; and refuses one that has no room.

The constants are measured: on an H200 at the shapes of Llama 8B and 70B (benchmarks/calibration.py,
docs/calibration.md), and on two cores of a CPU with the small model of docs/quality.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from nf4conv.calibrate.windows import Windows
from nf4conv.errors import Nf4convError
from nf4conv.format.units import size
from nf4conv.plan.calibration import Needs
from nf4conv.system.memory import available_memory, resident

MEMORY: Final = 4 * 10**9
"""Bytes of hidden states that are kept in memory, unless the user allows another number."""

_USUAL_TOKENS: Final = 65536

_GPU_SECONDS_AT_START: Final = 25.0  # kernels are compiled, and CUDA begins
_GPU_SECONDS_OF_WEIGHT: Final = 10e-9  # to round it
_GPU_SECONDS_OF_WEIGHT_AND_TOKENS: Final = 5e-9  # for 65,536 of them

_CPU_SECONDS_OF_WEIGHT: Final = 2.2e-6
_CPU_SECONDS_OF_WEIGHT_AND_TOKENS: Final = 5.6e-6

_OUTPUTS: Final = 1.6  # of the time without --calibrate-output

_SQUARE_BYTES: Final = 20  # for [in, in]: moments to calibrate and judge by, a factor in float64
_STAGE_BYTES: Final = 16  # for each weight that is rounded at once, beside 12 for [in, in]
_OUTPUT_BYTES: Final = 24  # for [out, out] of a weight whose outputs count

_DEVICE_BYTES: Final = 10**9  # a batch on its way through a block, and what is rounded at a time
_HOST_BYTES: Final = 15 * 10**8  # Python, torch and transformers
_HOST_BYTES_WITH_GPU: Final = 22 * 10**8  # and CUDA


@dataclass(frozen=True)
class Shapes:
    """Describes the weights of a model as far as its needs depend on them.

    Attributes:
        blocks: the number of blocks.
        block_elements: the number of elements of the largest block.
        outside_elements: the number of elements outside the blocks that are used at one time.
        matrices: the shape of each weight that is calibrated, [out, in].
    """

    blocks: int
    block_elements: int
    outside_elements: int
    matrices: Sequence[tuple[int, int]]

    @property
    def calibrated(self) -> int:
        """The number of elements that are calibrated."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def working_bytes(self) -> int:
        """The most bytes that rounding takes at a time."""
        most = 0
        for rows, columns in set(self.matrices):
            factoring = _SQUARE_BYTES * columns**2
            # gate and up are rounded together, and so are queries, keys and values
            rounding = 12 * columns**2 + 2 * _STAGE_BYTES * rows * columns
            most = max(most, factoring, rounding)
        return most


def estimate(
    shapes: Shapes,
    windows: Windows,
    config: Mapping[str, Any],
    outputs: str | None,
    memory: int | None,
    finished_bytes: int,
) -> Needs:
    """Estimates what a calibration takes.

    Args:
        shapes: the weights of the model.
        windows: the tokens that it reads.
        config: the content of config.json.
        outputs: "qkv" or "all", as --calibrate-output has it; None without that option.
        memory: the bytes that the user allows for hidden states; None for the default.
        finished_bytes: the bytes that all finished blocks take on disk.
    """
    budget = MEMORY if memory is None else memory
    tokens = windows.ids.size / _USUAL_TOKENS
    weights = shapes.calibrated
    gpu_seconds = weights * (_GPU_SECONDS_OF_WEIGHT + tokens * _GPU_SECONDS_OF_WEIGHT_AND_TOKENS)
    cpu_seconds = weights * (_CPU_SECONDS_OF_WEIGHT + tokens * _CPU_SECONDS_OF_WEIGHT_AND_TOKENS)
    working = shapes.working_bytes
    disk = finished_bytes
    others = 0
    if outputs is not None:
        gpu_seconds *= _OUTPUTS
        cpu_seconds *= _OUTPUTS
        squares = _output_squares(shapes, outputs)
        working += _OUTPUT_BYTES * max(squares, default=0)
        disk += 4 * sum(squares)
        others = shapes.blocks + 1
    narrow = _Hidden.of(hidden_bytes(windows, config, 2), others, budget)
    wide = _Hidden.of(hidden_bytes(windows, config, 4), others, budget)
    gpu_bytes = max(2 * shapes.block_elements + working, 2 * shapes.outside_elements)
    cpu_bytes = max(4 * shapes.block_elements + working, 4 * shapes.outside_elements)
    return Needs(
        gpu_seconds=_GPU_SECONDS_AT_START + gpu_seconds,
        gpu_bytes=gpu_bytes + narrow.each + _DEVICE_BYTES,
        gpu_host_bytes=_HOST_BYTES_WITH_GPU + narrow.in_memory,
        cpu_seconds=cpu_seconds,
        cpu_bytes=_HOST_BYTES + cpu_bytes + wide.in_memory,
        disk_bytes=disk + wide.on_disk,
    )


@dataclass(frozen=True)
class _Hidden:
    """The bytes of hidden states: those of all windows, and where all that are kept are."""

    each: int
    in_memory: int
    on_disk: int

    @classmethod
    def of(cls, each: int, others: int, budget: int) -> "_Hidden":
        """Divides the hidden states, and `others` of as many bytes beside them, by a budget."""
        kept = each if each <= budget else 0
        share = budget // (others + 1)  # session.py and gradients.py divide it so
        if each <= share:
            kept += others * each
        return cls(each, kept, (1 + others) * each - kept)


def hidden_bytes(windows: Windows, config: Mapping[str, Any], itemsize: int) -> int:
    """Returns the bytes of the hidden states of all windows."""
    text = config.get("text_config", config)
    width = next((text[key] for key in ("hidden_size", "n_embd", "d_model") if key in text), 4096)
    return int(windows.ids.size * width * itemsize)


def _output_squares(shapes: Shapes, outputs: str) -> list[int]:
    """Returns about the sizes of the second moments of gradients at outputs."""
    squares = [rows**2 for rows, _ in shapes.matrices]
    if outputs == "all":
        return squares
    # the first weights of a block are its smallest ones, if not by much
    return sorted(squares)[: 4 * shapes.blocks]


def require_memory(needs: Needs, device: torch.device) -> None:
    """Refuses a calibration that this machine has too little memory for.

    Raises:
        Nf4convError: the device or the host has too little.
    """
    host = needs.cpu_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device)
        host = needs.gpu_host_bytes
        if free < needs.gpu_bytes:
            raise Nf4convError(
                f"{device}: calibrating takes about {size(needs.gpu_bytes)} of its memory, and "
                f"{size(free)} are free; a GPU with so much would suffice, fewer "
                f"--calibration-tokens take less, and --device cpu takes about "
                f"{size(needs.cpu_bytes)} of host memory"
            )
    available = available_memory() + resident()
    if available < host:
        raise Nf4convError(
            f"calibrating takes about {size(host)} of host memory, and {size(available)} are "
            f"free; so much would suffice, and fewer --calibration-tokens or a smaller "
            f"--calibration-memory take less"
        )
