"""Converts between the bits of registers and the values that PTX types give them."""

import numpy as np
import torch

Bits = np.ndarray  # [threads] uint64


def width(kind: str) -> int:
    """Returns the bits of a PTX type, such as pred, bf16, s32 or b64."""
    if kind == "pred":
        return 1
    if kind == "bf16":
        return 16
    return int(kind[1:])


def cut(bits: Bits, count: int) -> Bits:
    """Returns the lowest bits."""
    if count == 64:
        return bits
    return bits & np.uint64((1 << count) - 1)


def number(bits: Bits, kind: str) -> np.ndarray:
    """Returns the values of bits: float64 for f32, int64 for all other types."""
    if kind == "f32":
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    count = width(kind)
    bits = cut(bits, count)
    if kind[0] == "s":
        return bits.astype(f"uint{count}").view(f"int{count}").astype(np.int64)
    return bits.view(np.int64)


def raw(values: np.ndarray, kind: str) -> Bits:
    """Returns the bits of values, the reverse of `number`."""
    if kind == "f32":
        return values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return cut(values.astype(np.int64).view(np.uint64), width(kind))


def halves(bits: Bits, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 16-bit floats in the low and in the high halves of 32 bits."""
    parts = torch.from_numpy(bits.astype(np.uint32).view(np.int16).copy())
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    values = parts.view(dtype).double().numpy()
    return values[0::2], values[1::2]
