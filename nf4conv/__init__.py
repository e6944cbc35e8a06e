"""nf4conv: Hugging Face checkpoints to 4-bit bitsandbytes NF4/FP4 and back, streamed, bit-exact and
verified.
"""

import importlib
from pathlib import Path

__version__ = "0.1.0"

# Public names, and the modules they live in, are those of the stub. They are looked up on first
# use: importing nf4conv must not import torch, which takes seconds, for the sake of `nf4conv
# --help` and of plans.
_STUB = Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
_HOME_OF = {
    line.split()[3]: line.split()[1] for line in _STUB.splitlines() if line.startswith("from ")
}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'nf4conv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
