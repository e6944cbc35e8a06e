"""Chooses what multiplies x with a packed weight on a GPU, by their shapes, and prepares it."""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.nn import functional

from nf4conv.codec.kernels.decoding.dequantize import prepare_dequantize
from nf4conv.codec.kernels.internals import CannotLaunchError, stream_of
from nf4conv.codec.quant_state import Addresses, Form
from nf4conv.inference.kernels.product import launches
from nf4conv.inference.kernels.product.launches import Product
from nf4conv.inference.kernels.product.panels.plans import is_faster
from nf4conv.inference.kernels.product.panels.prepare import prepare_panel

Multiply = Callable[[torch.Tensor, Addresses, torch.Tensor | None], torch.Tensor]
"""x, a weight, a bias or None → x · Wᵀ + bias."""

Decode = Callable[[Addresses], torch.Tensor]
"""A weight → W, decoded."""


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
    """Returns the largest of 16, 4 and 1 that divides an address."""
    if address % 16 == 0:
        return 16
    return 4 if address % 4 == 0 else 1


@functools.lru_cache(maxsize=4096)
def prepare_multiply(
    x_shape: torch.Size, dtype: torch.dtype, device: torch.device, matrix: Matrix
) -> Multiply:
    """Prepares what multiplies all x of one shape and dtype with all weights of one kind."""
    rows = x_shape[:-1].numel()
    product = None
    if rows > 0 and has_kernel(matrix, dtype):
        n, k, form, _ = matrix
        if rows <= launches.most_rows(device):
            product = launches.prepare_product(x_shape, dtype, device, n, form)
        elif launches.is_hopper(device):
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            if is_faster(rows, n, k, processors):
                with suppress(CannotLaunchError):  # driver or Triton cannot
                    product = prepare_panel(x_shape, dtype, device, n, form)
    if product is None:
        return _prepare_decoded(dtype, device, matrix)
    return _there(_with_bias(product), device)


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _there(multiply: Callable[_P, _T], device: torch.device) -> Callable[_P, _T]:
    """Lets a function run with a device as the current one."""
    if torch.cuda.device_count() == 1:
        return multiply

    def multiply_there(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch.cuda.device(device):
            return multiply(*args, **kwargs)

    return multiply_there


def has_kernel(matrix: Matrix, dtype: torch.dtype) -> bool:
    """Returns False if a weight is decoded before it is multiplied with few rows.

    The kernels add up 64 k before they scale, and load 16 bytes of codes at once.
    """
    n, k, form, alignment = matrix
    fits = k % 64 == 0 and form.blocksize >= 64 and alignment == 16
    return fits and dtype != torch.float32 and 0 < n * k < launches.MOST_ELEMENTS


def _with_bias(product: Product) -> Multiply:
    """Adds a bias to a product."""

    def multiply(x: torch.Tensor, weight: Addresses, bias: torch.Tensor | None) -> torch.Tensor:
        out = product(x, weight)
        if bias is not None:
            out.add_(bias)
        return out

    return multiply


@functools.lru_cache(maxsize=1024)
def prepare_decode(dtype: torch.dtype, device: torch.device, matrix: Matrix) -> Decode:
    """Prepares what decodes all weights of one kind to a dtype."""
    shape = (matrix.n, matrix.k)
    write = None
    if matrix.n * matrix.k > 0:
        write = prepare_dequantize(shape, dtype, device, matrix.form, matrix.alignment)
    current_stream = stream_of(device)

    def decode(weight: Addresses) -> torch.Tensor:
        decoded = torch.empty(shape, dtype=dtype, device=device)
        if write is not None:
            write(current_stream(), decoded.data_ptr(), weight)
        return decoded

    return _there(decode, device)


def _prepare_decoded(dtype: torch.dtype, device: torch.device, matrix: Matrix) -> Multiply:
    """Prepares to decode, then to call the library's product.

    Under autocast the library computes in another dtype; the result has that of x all the same.
    """
    decode = prepare_decode(dtype, device, matrix)

    def multiply(x: torch.Tensor, weight: Addresses, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        return functional.linear(x, decode(weight), bias).to(dtype)

    return multiply
