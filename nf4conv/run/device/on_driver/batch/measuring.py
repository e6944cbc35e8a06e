"""The errors of weights measured on the GPU as they are packed.

Codes come from the packing itself and count as right; scales are those that are stored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nf4conv.format.layout import Format
from nf4conv.plan.rows import Errors
from nf4conv.run.device.on_driver.batch.buffers import Launch
from nf4conv.run.device.on_driver.batch.input import BatchInput, Row
from nf4conv.run.device.on_driver.batch.output import SUMS, OutputLayout
from nf4conv.run.device.on_driver.capability import measuring_purpose
from nf4conv.run.pieces import WeightPiece
from nf4conv.sources.foreign.bitsandbytes import cut_parts
from nf4conv.sources.stored_weights import StoredWeight


@dataclass(frozen=True)
class _Scales:
    """Tells where the stored scales of a piece are in the input: positions."""

    absmax: int
    nested_absmax: int | None
    nested_offset: int
    offset: float  # what is to be put there


class Measurement:
    """Measures the errors of weights that one call packs.

    Args:
        batch: the input, which has not been read; the stored scales are added to it.
        pieces: what is packed.
        format: how.
        stored: for each piece the weight whose scales are read.

    Attributes:
        tile: elements that a program looks at.
    """

    def __init__(
        self,
        batch: BatchInput,
        pieces: Sequence[WeightPiece],
        format: Format,
        stored: Sequence[StoredWeight],
    ) -> None:
        self._batch = batch
        self._kernels = batch.buffers.gpu.kernels[measuring_purpose(format)]
        self.tile = self._kernels.numbers["tile"]
        self._scales = []
        for weight, piece in zip(stored, pieces, strict=True):
            self._scales.append(_add_scales(batch, weight, piece))

    def launches(self, out: OutputLayout, rows: Sequence[Row]) -> list[Launch]:
        """Returns the launches that measure; rows are those of the weights that are packed."""
        base = self._batch.buffers.output.address + out.sums
        launches = []
        for row, scales, place in zip(rows, self._scales, out.sums_starts, strict=False):
            launches.append(self._launch(row, scales, base + place))
        return launches

    def _launch(self, row: Row, scales: _Scales, sums: int) -> Launch:
        tables = self._kernels.tables
        programs = -(-row.elements // self.tile)
        nested_offset = self._batch.put(scales.nested_offset, scales.offset)
        nested_absmax = nested_offset  # which is not read without double quantization
        if scales.nested_absmax is not None:
            nested_absmax = self._batch.address(scales.nested_absmax)
        arguments = (
            row.source,
            row.result,
            self._batch.address(scales.absmax),
            tables["nested"],
            nested_absmax,
            nested_offset,
            tables["values"],
            tables["bounds"],
            sums,
            sums + 8 * programs,
            sums + 24 * programs,
            row.elements,
            programs,
        )
        return Launch(self._kernels.functions["compare"], programs, arguments)

    def errors(self, view: memoryview, out: OutputLayout) -> list[Errors]:
        """Returns what has been measured of each weight."""
        found = []
        for start, stop in pairwise(out.sums_starts):
            found.append(_added_up(view[out.sums + start : out.sums + stop]))
        return found


def _add_scales(batch: BatchInput, weight: StoredWeight, piece: WeightPiece) -> _Scales:
    """Adds the scales of a piece as they are stored."""
    stop = piece.start + piece.elements
    parts = cut_parts(weight.parts(), weight.format.blocksize, piece.start, stop)
    absmax = batch.add(parts["absmax"].file_range)
    nested_absmax = None
    if "nested_absmax" in parts:
        nested_absmax = batch.add(parts["nested_absmax"].file_range)
    return _Scales(absmax, nested_absmax, batch.take(4), weight.nested_offset or 0.0)


def _added_up(sums: memoryview) -> Errors:
    """Adds up the sums of all programs; each kind of sum has a value for each program."""
    programs = len(sums) // SUMS
    peaks = sums[: 8 * programs].cast("f").tolist()
    squares = sums[8 * programs : 24 * programs].cast("d").tolist()
    outside = sums[24 * programs :].cast("q").tolist()
    return Errors(
        squared_error=math.fsum(squares[:programs]),
        squared_weight=math.fsum(squares[programs:]),
        largest=max(peaks[:programs], default=0.0),
        largest_of_absmax=max(peaks[programs:], default=0.0),
        outside=sum(outside),
        differing=0,
        not_nearest=0,
    )
