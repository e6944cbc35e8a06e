"""States what a device does for a task, and what goes to it and comes back.

on_torch/ and on_driver/ implement it. One call does the work of a batch, so that a device can bring
all its bytes at once. The memory views that a device returns are valid until its next call.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.format.layout import Format
from nf4conv.plan.jobs import CopyJob, PackJob
from nf4conv.plan.rows import Errors
from nf4conv.run.pieces import WeightPiece
from nf4conv.sources.cutting import Piece
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import TensorInfo


class NonFiniteError(SourceError):
    """A weight that was to be packed holds NaN or infinity, or values so large that its scales
    become infinite.
    """

    def __init__(self, job: PackJob) -> None:
        ruined = "checkpoint" if job.source.unmerged is job.source else "adapter"
        super().__init__(
            f"{job.source.file}: {job.source.name}: has values that are NaN or infinite, or too "
            f"large for {job.format.dtype} or double quantization; repair the {ruined}, give "
            f"another --dtype, or leave it unquantized with --exclude",
            path=job.source.file,
            tensor=job.source.name,
        )


class CastError(SourceError):
    """A tensor holds values that are infinite in the dtype that it would be cast to, or becomes NaN
    or infinite where adapters change it.
    """

    def __init__(self, tensor: TensorInfo, tag: str, *, is_merged: bool = False) -> None:
        dtype = DTYPE_NAMES.get(tag, tag)
        if is_merged:
            text = (
                f"adapters make finite values NaN or infinite in {dtype}: they hold such values, "
                f"or values too large for it; repair the adapter, or give another --dtype"
            )
        else:
            text = (
                f"has values too large for {dtype}, to which it would be cast; give another --dtype"
            )
        super().__init__(
            f"{tensor.file}: {tensor.name}: {text}", path=tensor.file, tensor=tensor.name
        )


class Gathered:
    """The absmax of a large weight, which several workers pack piece by piece.

    They write it to memory of one device; whoever packs the last piece takes it over.
    """

    def __init__(self, blocks: int, pieces: int) -> None:
        self.blocks = blocks
        self._left = pieces
        self._memory: Any = None  # a tensor, or memory of the driver
        self._lock = threading.Lock()

    def memory(self, allocate: Callable[[int], Any]) -> Any:
        """Returns where all pieces write their share; `allocate` is asked once, for all blocks."""
        with self._lock:
            if self._memory is None:
                self._memory = allocate(self.blocks)
            return self._memory

    def count_piece(self) -> bool:
        """Counts a piece as packed; returns True for the last one."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def take(self) -> Any:
        """Returns the memory with all absmax, and keeps it no longer.

        Tasks live as long as their shard does: kept here, memory would grow with what has been
        packed.
        """
        memory = self._memory
        self._memory = None
        return memory


@dataclass(frozen=True)
class Scales:
    """The scales of neighbouring weights, one weight after the other."""

    absmax: memoryview  # float32; with double quantization their 8-bit codes
    nested_absmax: memoryview | None  # float32; None without double quantization
    nested_offsets: Sequence[float] | None  # of each weight; None without double quantization


@dataclass(frozen=True)
class Packed:
    """Neighbouring weights, or a piece of one, in 4 bits."""

    codes: memoryview  # the bytes of one weight after those of the other
    scales: Scales | None  # None for a piece whose absmax is gathered
    errors: Sequence[Errors]  # of each weight; empty if none were to be measured


class Converted(NamedTuple):
    """Values of a kept tensor in the dtype that it is stored in."""

    job: CopyJob
    start: int  # bytes of the converted tensor before them
    values: memoryview


class CopyPart(NamedTuple):
    """A kept tensor, or a part of it."""

    job: CopyJob
    piece: Piece


class Device(Protocol):
    """A device as one thread uses it."""

    def pack(
        self,
        pieces: Sequence[WeightPiece],
        format: Format,
        gathered: Gathered | None,
        stored: Sequence[Bitsandbytes4bit],
    ) -> Packed:
        """Packs whole weights of one kind that fit into a worker's buffer, or a piece of one.

        A piece leaves its absmax in `gathered`. Errors are measured with the scales of the stored
        weights, if there are any. A NonFiniteError says that a weight holds NaN or infinity.
        """

    def compress(self, gathered: Gathered, format: Format) -> Scales:
        """Returns the scales of a large weight, all pieces of which are packed."""

    def convert(self, parts: Sequence[CopyPart]) -> Iterator[Converted]:
        """Decodes and casts kept tensors, or parts of them, that go through the same dtypes.

        Either all of them are encoded, or none is. A CastError, once all values have been given,
        says that finite ones become infinite.
        """
