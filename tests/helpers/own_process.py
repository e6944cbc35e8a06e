"""Runs programs in processes of their own, in which Triton compiles kernels.

Tests interpret them (conftest.py), and Triton cannot compile in the same process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nf4conv.codec.backends import why_plain

ROOT = Path(__file__).parents[2]

CANNOT_COMPILE = bool(why_plain((9, 0)))  # torch or Triton is too old, as with the oldest releases
NEEDS_COMPILER = "needs a Triton that compiles the kernels"

compiles = pytest.mark.skipif(CANNOT_COMPILE, reason=NEEDS_COMPILER)
"""Marks tests that compile kernels."""


def run_compiling(*arguments: object, **environment: object) -> subprocess.CompletedProcess[str]:
    """Runs Python in the repository's folder, for ten minutes at most.

    Args:
        arguments: of Python: a file, `-c` and a program, or `-m` and a module, with its arguments.
        environment: variables beside those of this process.

    Returns:
        How it ended, and what it printed.
    """
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = [str(ROOT), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    variables |= {name: str(value) for name, value in environment.items()}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600, check=False
    )
