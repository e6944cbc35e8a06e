"""Defines the errors that a user meets. Each message is one line: where, what is wrong, what to do.

Nf4convError                    base of all; the command line prints the line and exits with 2
├── SourceError                 the input is missing, truncated, malformed or unsupported
│   ├── DiffusersFolderError    the input is a diffusers pipeline, but must be one checkpoint
│   ├── NoDiffusersFolderError  the input is no diffusers pipeline, but must be one
│   ├── AdapterError            the input is a LoRA adapter, but must be a model
│   ├── NonFiniteError          a weight to pack holds NaN or infinity (run/device/protocol.py)
│   ├── CastError               a value is too large for its new dtype (run/device/protocol.py)
│   └── MergeError              adapters make a tensor NaN or infinite (run/device/protocol.py)
├── PlanError                   the input is readable, but the options do not fit it
├── OutputError                 the output exists already, is in use, or the disk is full
├── VerificationError           the output differs from what was planned; exit code 1
├── CodecError                  the codec cannot take a tensor or quant state; also a ValueError
└── CudaError                   a call of the CUDA driver failed (run/device/on_driver/driver.py)
    └── CudaOutOfMemoryError    the GPU is full, or the host can pin no more memory
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Nf4convError(Exception):
    """Is the base of every error that is meant for the user. Its text is one line."""


class SourceError(Nf4convError):
    """Says that the source checkpoint cannot be read."""


class DiffusersFolderError(SourceError):
    """Says that the source is a diffusers pipeline, which holds several checkpoints, not one."""


class NoDiffusersFolderError(SourceError):
    """Says that the source is no diffusers pipeline, although one was expected."""


class AdapterError(SourceError):
    """Says that the source is a LoRA adapter, although a model was expected."""


class PlanError(Nf4convError):
    """Says that the options do not fit the source, or each other."""


class VerificationError(Nf4convError):
    """Says that the written output is not what the plan required."""


class OutputError(Nf4convError):
    """Says that the output cannot be written."""


class CodecError(Nf4convError, ValueError):
    """Says that the codec cannot take a tensor or a quant state."""


@contextmanager
def named(path: object, kind: type[Nf4convError], *, inside: bool = False) -> Iterator[None]:
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
        raise kind(f"{place}: {error.strerror or error}") from error
