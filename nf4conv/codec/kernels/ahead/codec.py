"""Holds the kernels for one purpose, and what several purposes say of their arguments."""

from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.codec.kernels.compiling import Variant

# Tensors that say only of what dtype an argument is.
UINT8: Final = torch.empty(0, dtype=torch.uint8)
INT32: Final = torch.empty(0, dtype=torch.int32)
INT64: Final = torch.empty(0, dtype=torch.int64)
FLOAT32: Final = torch.empty(0, dtype=torch.float32)
FLOAT64: Final = torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True)
class Codec:
    """Kernels for one purpose on one kind of GPU.

    Attributes:
        kernels: by name.
        tables: the bytes of the tables that the kernels read, by name.
        numbers: what the kernels' callers must know, by name.
    """

    kernels: dict[str, Variant]
    tables: dict[str, bytes]
    numbers: dict[str, int]


def bytes_of(table: torch.Tensor) -> bytes:
    """Returns the bytes of a table."""
    raw: bytes = table.cpu().numpy().tobytes()
    return raw
