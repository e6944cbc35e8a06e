"""Names kernels, and loads compiled ones to a GPU."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from nf4conv.run.device.on_driver.driver import Function

T = TypeVar("T")


class Purpose(NamedTuple):
    """Says what kernels are for."""

    maker: str  # the function of codec.kernels.ahead that makes them
    # its arguments. dtypes are tags, but those of packed weights are names
    details: tuple[Any, ...]


@dataclass(frozen=True)
class Kernels(Generic[T]):
    """Holds the kernels for a purpose, see codec.kernels.ahead.Codec.

    Attributes:
        functions: the kernels by name.
        tables: what they read, by name: bytes, or addresses on the GPU.
        numbers: what decides how many programs are launched, by name.
    """

    functions: Mapping[str, Function]
    tables: Mapping[str, T]
    numbers: Mapping[str, int]


def load_kernels(content: Mapping[str, Any]) -> Kernels[bytes]:
    """Loads kernels to the current device from the JSON that compiling.py makes of them."""
    functions = {}
    for name, kernel in content["kernels"].items():
        functions[name] = Function(
            cubin=base64.b64decode(kernel["cubin"]),
            entry=kernel["entry"],
            shared=kernel["shared"],
            threads=kernel["threads"],
        )
    tables = {}
    for name, table in content["tables"].items():
        tables[name] = base64.b64decode(table)
    return Kernels(functions, tables, content["numbers"])
