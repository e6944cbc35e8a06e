"""One NVIDIA GPU as one thread uses it, without torch."""

from collections.abc import Iterator, Sequence

from nf4conv.format.layout import Format
from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_driver.batch.buffers import DriverBuffers
from nf4conv.run.device.on_driver.batch.convert import convert
from nf4conv.run.device.on_driver.batch.packing import compress, pack
from nf4conv.run.device.on_driver.batch.subtract import subtract
from nf4conv.run.device.protocol import (
    Converted,
    CopyPart,
    Gathered,
    Packed,
    PairOfPieces,
    Scales,
)
from nf4conv.run.pieces import WeightPiece
from nf4conv.sources.stored_weights import StoredWeight


class DriverDevice(DriverBuffers):
    """Does with kernels what a device does for a task, see device/protocol.py."""

    def pack(
        self,
        pieces: Sequence[WeightPiece],
        format: Format,
        gathered: Gathered | None,
        stored: Sequence[StoredWeight],
    ) -> Packed:
        return pack(self, pieces, format, gathered, stored)

    def compress(self, gathered: Gathered, elements: int, format: Format) -> Scales:
        return compress(self, gathered, elements, format)

    def convert(self, parts: Sequence[CopyPart]) -> Iterator[Converted]:
        return convert(self, parts)

    def subtract(self, pairs: Sequence[PairOfPieces]) -> list[Errors]:
        return subtract(self, pairs)
