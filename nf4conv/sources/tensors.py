"""Describes the tensors of a checkpoint: where their bytes are, and how they are decoded.

A tensor that is stored as it is has a dtype, a shape and a range of bytes. Any other tensor has an
`Encoding` besides, which names the tensors that it is decoded from. encodings/types/ has the kinds
of encodings, and encodings/rules.py finds out which one a tensor has.
run/device/on_torch/reading.py and run/device/on_driver/batch/loading.py read and decode it.
"""

import math
from pathlib import Path
from typing import NamedTuple, TypeAlias

FileRange: TypeAlias = tuple[Path, int, int]  # (file, start, stop) in bytes

Parts: TypeAlias = tuple[tuple[str, "TensorInfo"], ...]
"""(role, tensor) of each tensor that an encoded one is decoded from. The first role is "values"."""


class TensorInfo(NamedTuple):
    """One tensor of a file, as its header describes it."""

    name: str  # key in the state dict
    dtype: str  # safetensors' dtype tag: "BF16", "F16", "F32", "F8_E4M3", "U8", …
    shape: tuple[int, ...]  # sizes, outermost first
    file: Path  # the file that holds it
    start: int  # where its bytes begin in that file, from the file's first byte
    stop: int  # where they end
    # None if the bytes are the elements in this dtype and shape. Otherwise file, start and stop are
    # those of the part that is read first: the largest one
    encoding: "Encoding | None" = None

    @property
    def file_range(self) -> FileRange:
        """Returns where the tensor's bytes are; of an encoded tensor, those of one part."""
        return self.file, self.start, self.stop

    @property
    def file_ranges(self) -> list[FileRange]:
        """Returns where the bytes of a tensor are that is stored as it is, or of some columns."""
        if self.encoding is not None and self.encoding.file_ranges is not None:
            return self.encoding.file_ranges
        return [self.file_range]

    @property
    def nbytes(self) -> int:
        """Returns its bytes in the source; of an encoded tensor, those of all parts."""
        return self.stop - self.start if self.encoding is None else self.encoding.nbytes

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def files(self) -> set[Path]:
        """Returns the files that it is read from."""
        if self.encoding is None:
            return {self.file}
        found = set()
        for _, part in self.encoding.parts:
            found |= part.files
        return found

    @property
    def unmerged(self) -> "TensorInfo":
        """Returns the tensor that adapters are merged into; itself if there are none."""
        if self.encoding is not None and self.encoding.unmerged is not None:
            return self.encoding.unmerged
        return self


class Encoding:
    """Tells how a tensor is decoded from others; encodings/types/ has the kinds."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Returns what reports call the encoding."""
        raise NotImplementedError

    @property
    def parts(self) -> Parts:
        """Returns the tensors that are read to decode this one, with their roles."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all parts."""
        total = 0
        for _, part in self.parts:
            total += part.nbytes
        return total

    @property
    def file_ranges(self) -> list[FileRange] | None:
        """Returns where the bytes are if they lie in several runs of one file; None otherwise."""
        return None

    @property
    def unmerged(self) -> TensorInfo | None:
        """Returns the tensor that adapters are merged into; None if there are none."""
        return None

    def decodes_like(self, other: "Encoding") -> bool:
        """Returns True if parts of equal layout and equal bytes decode to equal tensors."""
        raise NotImplementedError
