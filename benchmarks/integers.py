"""Weights of packed integers with random content, as each method stores them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

Tensors = dict[str, torch.Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP: Final = 128


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, device=DEVICE).to(torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.rand(shape, device=DEVICE) * 0.01 + 1e-3).to(dtype)


def int4(name: str, rows: int, columns: int, *, group_size: int) -> Tensors:
    return {
        f"{name}_packed": words(rows, columns // 8),
        f"{name}_scale": scales(rows, columns // group_size, dtype=torch.bfloat16),
        f"{name}_shape": torch.tensor([rows, columns]),
    }


def gptq(name: str, rows: int, columns: int, *, is_reordered: bool) -> Tensors:
    module = name.removesuffix(".weight")
    index = torch.arange(columns) // GROUP
    if is_reordered:
        index = index[torch.randperm(columns)]
    return {
        f"{module}.qweight": words(columns // 8, rows),
        f"{module}.qzeros": words(columns // GROUP, rows // 8),
        f"{module}.scales": scales(columns // GROUP, rows),
        f"{module}.g_idx": index.to(torch.int32),
    }


def awq(name: str, rows: int, columns: int) -> Tensors:
    module = name.removesuffix(".weight")
    return {
        f"{module}.qweight": words(columns, rows // 8),
        f"{module}.qzeros": words(columns // GROUP, rows // 8),
        f"{module}.scales": scales(columns // GROUP, rows),
    }


INTEGERS: Final[dict[str, tuple[Callable[[str, int, int], Tensors], dict[str, Any]]]] = {
    "int4 g32": (
        partial(int4, group_size=32),
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "int4 g128": (
        partial(int4, group_size=128),
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "gptq": (
        partial(gptq, is_reordered=False),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    ),
    "gptq desc_act": (
        partial(gptq, is_reordered=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
}
