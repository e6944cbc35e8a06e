"""Chooses the backend that computes on a device: cpu/, kernels/, or reference/ where there is
nothing faster.
"""

import functools
from importlib.util import find_spec
from types import ModuleType
from typing import Final

import torch

from nf4conv.codec import cpu, reference

OLDEST_CAPABILITY: Final = (8, 0)
"""Compute capability of the oldest GPU that runs the kernels: their max.bf16x2, max.f16x2 and
cvt.rn.bf16x2.f32 are instructions of sm_80.
"""


@functools.cache
def backend(device: torch.device) -> ModuleType:
    """Returns the package whose functions run on a device: cpu, kernels or reference."""
    if device.type == "cpu":
        return cpu
    capability = None
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
    if why_plain(capability):
        return reference
    from nf4conv.codec import kernels  # importing Triton takes a second

    return kernels


def why_plain(capability: tuple[int, int] | None) -> str:
    """Returns why a GPU computes with plain torch and not with the kernels; empty if the kernels
    run. `capability` is that of an NVIDIA GPU, such as (9, 0); None for any other.
    """
    if capability is None:
        return "it is not an NVIDIA GPU"
    if capability < OLDEST_CAPABILITY:
        return (
            f"its compute capability is {capability[0]}.{capability[1]}, and the kernels need 8.0"
        )
    if find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def has_kernels(device: torch.device) -> bool:
    """Returns True if the Triton kernels compute on a device."""
    return backend(device).__name__ == "nf4conv.codec.kernels"
