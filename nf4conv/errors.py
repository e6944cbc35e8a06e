"""What can go wrong, said to the user in one line: where it is, what was found, what to do.

Nf4convError            everything below; the command line prints it as one line and exits with 2
├── SourceError         the input cannot be read: missing, truncated, malformed, unsupported
│   ├── DiffusersFolderError    it is a diffusers pipeline, where one checkpoint was expected
│   ├── NoDiffusersFolderError  it is no diffusers pipeline, where one was expected
│   ├── AdapterError    it is a LoRA adapter, where a model was expected
│   ├── NonFiniteError  a weight that was to be packed holds NaN or infinity   (run/shards.py)
│   └── CastError       a tensor does not fit into the dtype that it would be cast to   (run/shards.py)
├── PlanError           the input is readable, but the request cannot be met
├── OutputError         the destination: exists, in use, disk full
├── VerificationError   what has been written is not what was to be written; the command line exits with 1
├── CodecError          a tensor or quant state that the codec cannot take (also a ValueError)
└── CudaError           a call of the CUDA driver failed   (run/without_torch/driver.py)
    └── CudaOutOfMemoryError    the device, or what the host may pin, is full
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Nf4convError(Exception):
    """Base of every error that is meant for the user."""


class SourceError(Nf4convError):
    """The source checkpoint cannot be read."""


class DiffusersFolderError(SourceError):
    """The source is a diffusers pipeline, several checkpoints in one folder, where one was
    expected.
    """


class NoDiffusersFolderError(SourceError):
    """The source is no diffusers pipeline, where one was expected."""


class AdapterError(SourceError):
    """The source is a LoRA adapter, where a model was expected."""


class PlanError(Nf4convError):
    """The request cannot be met for this source."""


class VerificationError(Nf4convError):
    """What was written is not what was to be written."""


class OutputError(Nf4convError):
    """The destination cannot be written."""


class CodecError(Nf4convError, ValueError):
    """A tensor or quant state outside what the codec accepts."""


@contextmanager
def named(path: object, kind: type[Nf4convError], *, inside: bool = False) -> Iterator[None]:
    """Turn what the operating system says into an error of a kind that names a file: this one, or
    one `inside` it.
    """
    try:
        yield
    except OSError as error:
        place = (inside and error.filename) or path
        raise kind(f"{place}: {error.strerror or error}") from error
