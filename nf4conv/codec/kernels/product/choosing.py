"""Chooses what multiplies x with a packed weight on a GPU, by their shapes, and prepares it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from nf4conv.codec.kernels.decoding.dequantize import prepare_dequantize
from nf4conv.codec.kernels.product import launches
from nf4conv.codec.kernels.product.launches import Product, stream_of
from nf4conv.codec.quant_state import Addresses, Form

Multiply = Callable[[torch.Tensor, Addresses, torch.Tensor | None], torch.Tensor]
"""x, a weight, a bias or None → x · Wᵀ + bias."""


class Matrix(NamedTuple):
    """A kind of weight: all that share one prepared product.

    Attributes:
        n, k: rows and columns.
        form: how it is packed.
        alignment: of its packed codes in bytes: 16, 4 or 1.
    """

    n: int
    k: int
    form: Form
    alignment: int


def alignment_of(address: int) -> int:
    """Return the largest of 16, 4 and 1 that divides an address."""
    if address % 16 == 0:
        return 16
    return 4 if address % 4 == 0 else 1


@functools.lru_cache(maxsize=4096)
def prepare_multiply(
    x_shape: torch.Size, dtype: torch.dtype, device: torch.device, matrix: Matrix
) -> Multiply:
    """Prepare what multiplies all x of one shape and dtype with all weights of one kind.

    Args:
        x_shape: [..., k].
        dtype: of x.
        device: a GPU that runs the kernels.
        matrix: the kind of weight.
    """
    rows = x_shape[:-1].numel()
    if 0 < rows <= launches.SHAPES[-1].rows and not why_decoded(matrix, dtype, device):
        product = launches.prepare_product(x_shape, dtype, device, matrix.n, matrix.form)
        multiply = _with_bias(product)
    else:
        multiply = _prepare_decoded(dtype, device, matrix)
    if torch.cuda.device_count() == 1:
        return multiply

    def multiply_there(
        x: torch.Tensor, weight: Addresses, bias: torch.Tensor | None
    ) -> torch.Tensor:
        with torch.cuda.device(device):
            return multiply(x, weight, bias)

    return multiply_there


def why_decoded(matrix: Matrix, dtype: torch.dtype, device: torch.device) -> str:
    """Return why a weight is decoded before it is multiplied with few rows; empty if a kernel
    multiplies without.
    """
    n, k, form, alignment = matrix
    if dtype == torch.float32:
        return "products in float32 have no kernel"
    if torch.cuda.get_device_capability(device)[0] != launches.CAPABILITY:
        return "the kernels need compute capability 9"
    if k % 64:
        return f"{k} columns are no multiple of 64"
    if form.blocksize < 64:
        return f"blocks of {form.blocksize} are shorter than 64"
    if alignment < 16:
        return "the packed codes do not begin at a multiple of 16 bytes"
    if n * k >= launches.MOST_ELEMENTS or n == 0:
        return f"{n * k} elements are too many or none"
    return ""


def _with_bias(product: Product) -> Multiply:
    """Add a bias to a product."""

    def multiply(x: torch.Tensor, weight: Addresses, bias: torch.Tensor | None) -> torch.Tensor:
        out = product(x, weight)
        if bias is not None:
            out.add_(bias)
        return out

    return multiply


def _prepare_decoded(dtype: torch.dtype, device: torch.device, matrix: Matrix) -> Multiply:
    """Prepare to decode, then to call the library's product."""
    shape = (matrix.n, matrix.k)
    decode = None
    if matrix.n * matrix.k > 0:
        decode = prepare_dequantize(shape, dtype, device, matrix.form, matrix.alignment)
    current_stream = stream_of(device)

    def multiply(x: torch.Tensor, weight: Addresses, bias: torch.Tensor | None) -> torch.Tensor:
        decoded = x.new_empty(shape)
        if decode is not None:
            decode(current_stream(), decoded.data_ptr(), weight)
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        return functional.linear(x, decoded, bias)

    return multiply
