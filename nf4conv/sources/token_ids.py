"""Reads token ids, and finds out whether a model has a tokenizer: what needs no transformers."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nf4conv.errors import PlanError, first_line

_TOKENIZER_FILES: Final = (
    "tokenizer", "tekken", "vocab", "merges", "spiece", "sentencepiece", "bpe"
)  # fmt: skip
_TOKENIZER_SUFFIXES: Final = (".model", ".tiktoken", ".spm", ".vocab", ".bpe")
"""How the names of files begin, or end, of which one at least belongs to every tokenizer."""


def read_ids(path: Path) -> npt.NDArray[np.integer[Any]]:
    """Reads integers of any type, in one dimension or more; a large file is mapped, not read.

    Raises:
        PlanError: they are no integers, or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise PlanError(f"{path}: is no file", path=path)  # numpy would wait at a pipe
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises anything for what is no array
        raise PlanError(
            f"{path}: is no array of numpy that can be read ({first_line(error)})", path=path
        ) from error
    if not isinstance(ids, np.ndarray) or ids.ndim < 1 or ids.dtype.kind not in "iu":
        raise PlanError(f"{path}: expected token ids: an array of integers", path=path)
    return ids


def has_tokenizer(folder: Path) -> bool:
    """Returns False if no file in a folder has a name that files of tokenizers have."""
    for file in folder.iterdir():
        if file.name.startswith(_TOKENIZER_FILES) or file.suffix in _TOKENIZER_SUFFIXES:
            return True
    return False
