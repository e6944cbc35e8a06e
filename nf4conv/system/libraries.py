"""Loads libraries of the operating system through ctypes."""

import ctypes
import sys
from typing import Final

CUDA_DRIVER: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
"""The library that NVIDIA's driver brings."""


def c_library() -> ctypes.CDLL:
    """Returns the library of C. Its calls let go of the interpreter lock."""
    try:
        return ctypes.CDLL(None)  # the program itself, which is linked with it
    except TypeError:  # Windows has no such handle
        return ctypes.CDLL("msvcrt")


def windows_library(name: str) -> ctypes.CDLL:
    """Returns a library of Windows, such as "kernel32".

    On 64 bits all calls of Windows are called as those of C are.
    """
    return ctypes.CDLL(name)


def cuda_driver() -> ctypes.CDLL:
    """Returns the library of the CUDA driver.

    Raises:
        OSError: there is no NVIDIA driver.
    """
    return ctypes.CDLL(CUDA_DRIVER)
