"""Divides a thread's output among the results of some weights.

Regions of the output, those that come down to the host first:

    head, packed codes, sums of errors, codes of absmax, nested_absmax, offsets | absmax, part sums

Without double quantization:

    head, packed codes, sums of errors, absmax
"""

from collections.abc import Sequence
from typing import Final

from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.layout import block_count
from nf4conv.run.device.on_driver.batch.buffers import HEAD
from nf4conv.run.device.on_driver.batch.sizes import starts

SUMS: Final = 32
"""Bytes of a program's sums, see kernels/error.py: two float32, two float64, an int64."""

_MEAN_ROOM: Final = 4 * 2**16
"""Bytes that the mean of a long vector needs for the sums of its parts."""


class OutputLayout:
    """The starts of regions, and of each weight in them; all in bytes.

    Args:
        sizes: elements of each weight.
        blocksize: elements that share one absmax.

    Attributes:
        size: bytes of the output that are used so far.
        visible: how many of them come down to the host.
        blocks: absmax of each weight.
        packed, sums, codes, nested_absmax, offsets, absmax, scratch: where these regions begin.
        packed_starts, sums_starts, codes_starts, nested_starts, absmax_starts: where each weight
            begins in its region, and where the last one ends; codes, nested_absmax and absmax are
            counted in values.
    """

    def __init__(self, sizes: Sequence[int], blocksize: int) -> None:
        self.size = HEAD
        self.visible = HEAD
        self.sizes = sizes
        self.blocks = [block_count(size, blocksize) for size in sizes]
        nested_blocks = [block_count(count, NESTED_BLOCKSIZE) for count in self.blocks]
        self.packed_starts = starts(-(-size // 2) for size in sizes)
        self.codes_starts = starts(self.blocks)
        self.nested_starts = starts(nested_blocks)
        self.absmax_starts = self.codes_starts
        self.sums_starts: list[int] = []

    def add_codes(self) -> None:
        """Makes room for packed codes."""
        self.packed = self._take(self.packed_starts[-1])
        self.visible = self.size

    def add_sums(self, tile: int) -> None:
        """Makes room for the sums of programs that each look at so many elements."""
        programs = [-(-size // tile) for size in self.sizes]
        self.sums_starts = starts(SUMS * count for count in programs)
        self.sums = self._take(self.sums_starts[-1])
        self.visible = self.size

    def add_scales(self, double_quant: bool, *, is_gathered: bool = False) -> None:
        """Makes room for all that becomes of the absmax, and for itself unless it is elsewhere."""
        if not double_quant:
            self.absmax = self._take(4 * self.absmax_starts[-1])
            self.visible = self.size
            return
        self.codes = self._take(self.codes_starts[-1])
        self.nested_absmax = self._take(4 * self.nested_starts[-1])
        self.offsets = self._take(4 * len(self.blocks))
        self.visible = self.size
        if not is_gathered:
            # torch's mean begins at a multiple of 16 bytes
            rooms = [count + -count % 4 for count in self.blocks]
            self.absmax_starts = starts(rooms)
            self.absmax = self._take(4 * self.absmax_starts[-1])
        self.scratch = self._take(_MEAN_ROOM)

    def _take(self, size: int) -> int:
        start = self.size
        self.size += size + -size % 256
        return start
