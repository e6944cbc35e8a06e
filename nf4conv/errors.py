"""Defines the errors that a user meets. Each message is one line: where, what is wrong, what to do.

The command line prints the line and exits with 2; after a VerificationError, with 1. Errors of a
device are beside what raises them: run/device/protocol.py, run/device/on_driver/driver.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self


class Nf4convError(Exception):
    """Is the base of every error that is meant for the user. Its text is one line.

    It names options as they are typed on the command line. `path` is the file or folder that it is
    about, and `tensor` the name of the tensor, as far as these are known.
    """

    def __init__(
        self, message: str, *, path: str | Path | None = None, tensor: str | None = None
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else Path(path)
        self.tensor = tensor

    @classmethod
    def about(cls, path: str | Path, tensor: str, what: str) -> Self:
        """Makes the error about one tensor of a file: `path: tensor: what`."""
        return cls(f"{path}: {tensor}: {what}", path=path, tensor=tensor)


class SourceError(Nf4convError):
    """Says that the source is missing, truncated, malformed or unsupported."""


class DiffusersFolderError(SourceError):
    """Says that the source is a diffusers pipeline, which holds several checkpoints, not one."""


class UndecodableError(SourceError):
    """Says that the source is quantized by a method that nf4conv does not decode."""


class PlanError(Nf4convError):
    """Says that the options do not fit the source, or each other."""


class OptionError(PlanError, ValueError):
    """Says that an option has a value that it cannot have."""


class VerificationError(Nf4convError):
    """Says that the written output is not what the plan required."""


class OutputError(Nf4convError):
    """Says that the output exists already, is in use, or cannot be written."""


class CodecError(Nf4convError, ValueError):
    """Says that the codec cannot take a tensor or a quant state."""


@contextmanager
def named(path: str | Path, kind: type[Nf4convError], *, inside: bool = False) -> Iterator[None]:
    """Turns an OSError of the `with` block into an error of the class `kind` that names `path`.

    `inside` names the file inside `path` that the OSError tells, if it tells one.
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
