"""Describes the tensors of a checkpoint: where their bytes are, and how they are decoded.

A tensor that is stored as it is has a dtype, a shape and a range of bytes. Any other tensor has an
`Encoding` besides, which names the tensors that it is decoded from. foreign/ has those of other
quantizations, gguf/blocks.py llama.cpp's, arranged.py what nf4conv itself arranges.
run/device/on_torch/reading.py and run/device/on_driver/loading.py read and decode it.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

from nf4conv.format.dtypes import DTYPE_BITS, DTYPE_NAMES

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

    @property
    def is_quantized(self) -> bool:
        """Returns True if a quantization encoded it, or what adapters are merged into."""
        encoding = self.unmerged.encoding
        return encoding is not None and encoding.is_quantization

    @property
    def made_from(self) -> str:
        """Returns what it is stored as, in the words of nf4conv.json."""
        if self.encoding is None:
            return DTYPE_NAMES.get(self.dtype, self.dtype)
        return self.encoding.made_from

    @property
    def rows_together(self) -> int | None:
        """Returns how many rows of a matrix must stay together, such as those that share scales.

        None if it cannot be cut into rows that are decoded alone.
        """
        if len(self.shape) != 2:
            return None
        return 1 if self.encoding is None else self.encoding.rows_together(self)

    def rows(self, start: int, stop: int) -> "TensorInfo":
        """Returns rows start … stop: all rows, or some between multiples of `rows_together`."""
        if (start, stop) == (0, self.shape[0] if self.shape else 1):
            return self
        if self.encoding is None:
            return cut_rows(self, start, stop)
        shape = (stop - start, *self.shape[1:])
        return self._replace(shape=shape, encoding=self.encoding.rows(self, start, stop))

    @property
    def is_stack(self) -> bool:
        """Returns True if `matrix` can take a matrix out of it."""
        if len(self.shape) != 3:
            return False
        return self.encoding is None or self.encoding.is_stack(self)

    def matrix(self, index: int) -> "TensorInfo":
        """Returns one matrix of a stack."""
        shape = self.shape[1:]
        if self.encoding is None:
            return cut_rows(self, index, index + 1)._replace(shape=shape)
        return self._replace(shape=shape, encoding=self.encoding.matrix(self, index))

    def transposed(self) -> "TensorInfo | None":
        """Returns the transpose of a matrix, if that is how its parts lie; None otherwise."""
        if self.encoding is None or len(self.shape) != 2:
            return None
        encoding = self.encoding.transposed()
        if encoding is None:
            return None
        return self._replace(shape=self.shape[::-1], encoding=encoding)


class Kernel(NamedTuple):
    """Says what decodes a tensor on a GPU without torch (run/device/on_driver/)."""

    maker: str  # the function of codec/kernels/ahead.py that makes the kernel
    details: tuple[Any, ...]  # its arguments after the dtype of the result; dtypes as tags
    # the parts and tables that it reads, in its order. What there is not is not read, but for
    # scales: a 1.0 is in their place
    pointers: tuple[str, ...] = ()
    shape: tuple[int, int] = (0, 0)  # the rows and columns that it goes through
    numbers: tuple[int, ...] = ()  # its arguments after these


class Encoding:
    """Tells how a tensor is decoded from others.

    Each kind is a frozen dataclass. Fields that hold tensors are its parts; what the other fields
    hold says how these are decoded.
    """

    __slots__ = ("_nbytes",)

    _nbytes: int  # what `nbytes` has found
    is_quantization: ClassVar[bool] = False  # True if the values lost precision when it was made

    @property
    def name(self) -> str:
        """Returns what reports call the encoding."""
        raise NotImplementedError

    @property
    def made_from(self) -> str:
        """Returns what a weight was made from, in the words of nf4conv.json."""
        return self.parts[0][1].made_from

    @property
    def has_few_bits(self) -> bool:
        """Returns True if the values are integers of fewer than 8 bits."""
        return False

    @property
    def parts(self) -> Parts:
        """Returns the tensors that are read to decode this one, with their roles.

        A role is the name of the field, but the first one is "values". Tensors of one field are
        numbered.
        """
        found: list[tuple[str, TensorInfo]] = []
        for field in _fields_of_parts(self.__class__):  # type: ignore[arg-type]
            value = getattr(self, field)
            if isinstance(value, TensorInfo):
                found.append((field if found else "values", value))
            elif type(value) is tuple:
                for tensor in _tensors_in(value):
                    found.append((str(len(found)) if found else "values", tensor))
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all parts."""
        try:
            return self._nbytes
        except AttributeError:  # a plan asks several times
            nbytes = sum(part.nbytes for _, part in self.parts)
            object.__setattr__(self, "_nbytes", nbytes)
            return nbytes

    @property
    def file_ranges(self) -> list[FileRange] | None:
        """Returns where the bytes are if they lie in several runs of one file; None otherwise."""
        return None

    @property
    def unmerged(self) -> TensorInfo | None:
        """Returns the tensor that adapters are merged into; None if there are none."""
        return None

    def kernel(self, tensor: TensorInfo) -> Kernel | None:
        """Returns what decodes a tensor on a GPU; None if only torch does."""
        return None

    def rows_together(self, tensor: TensorInfo) -> int | None:
        """Returns how many rows of a matrix must stay together; None if it cannot be cut."""
        return None

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> "Encoding":
        """Returns the encoding of rows start … stop, multiples of `rows_together` or the end."""
        raise AssertionError(f"{tensor.name}: {self.name} cannot be cut into rows")

    def is_stack(self, tensor: TensorInfo) -> bool:
        """Returns True if `matrix` can take matrices out of a tensor of three dimensions."""
        return False

    def matrix(self, tensor: TensorInfo, index: int) -> "Encoding":
        """Returns the encoding of one matrix of a stack."""
        raise AssertionError(f"{tensor.name}: {self.name} is no stack of matrices")

    def transposed(self) -> "Encoding | None":
        """Returns the encoding of the transpose, if that is how the parts lie; None otherwise."""
        return None


@cache
def _fields_of_parts(kind: Any) -> tuple[str, ...]:
    """Returns the names of fields that may hold tensors: these are asked for each weight."""
    return tuple(field.name for field in fields(kind) if "TensorInfo" in str(field.type))


def _tensors_in(value: tuple[Any, ...]) -> Iterator[TensorInfo]:
    """Yields the tensors in nested tuples."""
    for each in value:
        if isinstance(each, TensorInfo):
            yield each
        elif type(each) is tuple:
            yield from _tensors_in(each)


def cut_rows(part: TensorInfo, first: int, last: int) -> TensorInfo:
    """Cuts along the first dimension of a tensor that is stored as it is."""
    size = part.nbytes // part.shape[0]
    return part._replace(
        shape=(last - first, *part.shape[1:]),
        start=part.start + first * size,
        stop=part.start + last * size,
    )


def cut_elements(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Returns elements start … stop of a tensor that is stored as it is, in a flat shape."""
    bits = DTYPE_BITS[tensor.dtype]
    return tensor._replace(
        shape=(stop - start,),
        start=tensor.start + start * bits // 8,
        stop=tensor.start + -(-stop * bits // 8),
    )
