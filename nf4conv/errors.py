"""What can go wrong, said to the user in one line: where it is, what was found, what to do.

Nf4convError            everything below; the command line prints it as one line and exits with 2
├── SourceError         the input cannot be read: missing, truncated, malformed, unsupported
│   ├── PipelineError   it is a pipeline of diffusers, where one checkpoint was expected
│   └── NoPipelineError the other way round
├── PlanError           the input is readable, but the request cannot be met
├── OutputError         the destination: exists, in use, disk full
├── CodecError          a tensor or quant state that the codec cannot take (also a ValueError)
└── VerifyError         a finished checkpoint is not what it claims to be
"""


class Nf4convError(Exception):
    """Base of every error that is meant for the user."""


class SourceError(Nf4convError):
    """The source checkpoint cannot be read."""


class PipelineError(SourceError):
    """The source is a pipeline of diffusers, several checkpoints in one folder, where one was expected."""


class NoPipelineError(SourceError):
    """The source is no pipeline of diffusers, where one was expected."""


class PlanError(Nf4convError):
    """The request cannot be met for this source."""


class VerificationError(Nf4convError):
    """What was written is not what was to be written."""


class OutputError(Nf4convError):
    """The destination cannot be written."""


class CodecError(Nf4convError, ValueError):
    """A tensor or quant state outside what the codec accepts."""


class VerifyError(Nf4convError):
    """A checkpoint contradicts itself or its source."""
