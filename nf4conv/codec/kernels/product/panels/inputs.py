"""Names the inputs of the loop over k in its PTX."""

from typing import Final

import triton

LETTERS: Final = "rlllllllrrrrrrf"
"""Kinds of the inputs of `loop_assembly`."""


@triton.constexpr_function
def operand(name: str) -> str:
    """Returns an input of `loop_assembly` by its name."""
    names = ["thread", "packed", "absmax", "code", "nested", "offset", "table", "x"]
    names += ["row", "n", "k", "first", "turns", "shift", "norm"]
    return f"${1 + names.index(name)}"
