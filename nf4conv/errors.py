"""Defines the errors that a user meets. Each message is one line: where, what is wrong, what to do.

Nf4convError                    base of all; the command line prints the line and exits with 2
├── SourceError                 the input is missing, truncated, malformed or unsupported
│   ├── DiffusersFolderError    the input is a diffusers pipeline, but must be one checkpoint
│   ├── NoDiffusersFolderError  the input is no diffusers pipeline, but must be one
│   ├── AdapterError            the input is a LoRA adapter, but must be a model
│   ├── UndecodableError        the input is quantized by a method that nf4conv does not decode
│   ├── NonFiniteError          a weight to pack holds NaN or infinity (run/device/protocol.py)
│   └── CastError               a value is too large for its dtype (run/device/protocol.py)
├── PlanError                   the input is readable, but the options do not fit it
│   └── OptionError             an option has a value that it cannot have; also a ValueError
├── OutputError                 the output exists already, is in use, or the disk is full
├── VerificationError           the output differs from what was planned; exit code 1
├── CodecError                  the codec cannot take a tensor or quant state; also a ValueError
└── CudaError                   a call of the CUDA driver failed (run/device/on_driver/driver.py)
    └── CudaOutOfMemoryError    the GPU is full, or the host can pin no more memory
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

_Error = TypeVar("_Error", bound="Nf4convError")


class Nf4convError(Exception):
    """Is the base of every error that is meant for the user. Its text is one line.

    It names options as they are typed on the command line.

    Args:
        message: the line.
        path: the file or folder that the error is about. None if it is about none, or if that is
            not known.
        tensor: the name of the tensor that it is about. None likewise.

    Attributes:
        path: as given.
        tensor: as given.
    """

    def __init__(
        self, message: str, *, path: str | Path | None = None, tensor: str | None = None
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else Path(path)
        self.tensor = tensor

    @classmethod
    def about(cls: type[_Error], path: str | Path, tensor: str, what: str) -> _Error:
        """Makes the error about one tensor of a file: `path: tensor: what`."""
        return cls(f"{path}: {tensor}: {what}", path=path, tensor=tensor)


class SourceError(Nf4convError):
    """Says that the source checkpoint cannot be read."""


class DiffusersFolderError(SourceError):
    """Says that the source is a diffusers pipeline, which holds several checkpoints, not one."""


class NoDiffusersFolderError(SourceError):
    """Says that the source is no diffusers pipeline, although one was expected."""


class AdapterError(SourceError):
    """Says that the source is a LoRA adapter, although a model was expected."""


class UndecodableError(SourceError):
    """Says that the source is quantized by a method that nf4conv does not decode."""


class PlanError(Nf4convError):
    """Says that the options do not fit the source, or each other."""


class OptionError(PlanError, ValueError):
    """Says that an option has a value that it cannot have.

    Args:
        option: the name of the field, or of the keyword.
        value: the value that it has.
        expected: the values that it may have, in words.

    Attributes:
        option: as given.
        value: as given.
        expected: as given.
    """

    def __init__(self, option: str, value: object, expected: str) -> None:
        super().__init__(f"--{option.replace('_', '-')} {value}: expected {expected}")
        self.option = option
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[type["OptionError"], tuple[str, object, str]]:
        """Says how to make it again in another process."""
        return OptionError, (self.option, self.value, self.expected)


class VerificationError(Nf4convError):
    """Says that the written output is not what the plan required."""


class OutputError(Nf4convError):
    """Says that the output cannot be written."""


class CodecError(Nf4convError, ValueError):
    """Says that the codec cannot take a tensor or a quant state."""


@contextmanager
def named(path: str | Path, kind: type[Nf4convError], *, inside: bool = False) -> Iterator[None]:
    """Turns an OSError of the `with` block into an error that names a file.

    Args:
        path: the file or folder that the error names.
        kind: the class of the error to raise.
        inside: True names the file inside `path` that the OSError tells, if it tells one.

    Raises:
        Nf4convError: of the class `kind`, with the words of the operating system.
    """
    try:
        yield
    except OSError as error:
        place = path
        if inside and error.filename:
            place = error.filename
        raise kind(f"{place}: {error.strerror or error}", path=place) from error


def first_line(error: BaseException) -> str:
    """Returns the first line of what an error of another library says, at most 300 characters.

    A line that ends with a colon is followed by the next.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    text = lines[0]
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1].strip()}"
    return text[:300]
