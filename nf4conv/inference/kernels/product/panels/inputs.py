"""Names the inputs of the loop over k in its PTX."""

from typing import Final

import triton

LETTERS: Final = "rllllllrrrrrrrf"
"""Kinds of the inputs of a loop."""

TENSOR_MAP: Final = "panel_kernel_param_6"
"""What PTX calls the parameter of panel_kernel that the tensor map of x begins with."""


@triton.constexpr_function
def operand(name: str) -> str:
    """Returns an input of a loop by its name."""
    names = ["thread", "packed", "absmax", "code", "nested", "offset", "table", "column"]
    names += ["row", "n", "k", "first", "turns", "shift", "norm"]
    return f"${1 + names.index(name)}"
