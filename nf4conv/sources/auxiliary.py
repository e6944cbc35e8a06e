"""The files beside the weights that a loader needs: tokenizer, chat template, remote code, further
modules.

Top-level files are copied unless they are known not to belong; of sub-folders only what loaders
look for.
"""

import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from nf4conv.sources.own_files import own_files

_NAMES: Final = json.loads(Path(__file__).with_suffix(".json").read_bytes())
WEIGHT_SUFFIXES: Final = tuple(_NAMES["weights"])
_NO_WEIGHTS: Final = tuple(
    _NAMES["data of a model that looks like weights and without which it does not load"]
)

QUANTIZATION_LEFTOVERS: Final = tuple(_NAMES["quantization"])
"""Files by which loaders recognise another quantization method; they must not survive into our
output.
"""

_LEFT_OUT: Final = {
    *QUANTIZATION_LEFTOVERS,
    *(name for names in _NAMES["left out"].values() for name in names),
}
_FOREIGN_FOLDERS: Final = tuple(_NAMES["foreign folders"])
_LARGEST_MODULES: Final = 2**20


def auxiliary_files(
    folder: Path, root: Path | None = None, *, strays: bool = False
) -> tuple[PurePosixPath, ...]:
    """The files of a checkpoint folder that are copied as they are, relative to it, sorted.

    Links may not lead out of the `root` that the folder lies in; None for itself. The `strays` are
    those that would be copied if they were no links that lead out.
    """
    names, others = own_files(folder, root or folder)
    modules = folder / "modules.json"
    is_read = modules.name in names and modules.stat().st_size <= _LARGEST_MODULES
    return auxiliary_names(others if strays else names, modules.read_bytes() if is_read else None)


def auxiliary_names(names: Iterable[str], modules: bytes | None) -> tuple[PurePosixPath, ...]:
    """The files of a listing of a checkpoint's folder that are copied as they are, sorted.

    `modules` is the content of modules.json, if there is one.
    """
    folders = _module_folders(modules)
    return tuple(sorted(path for path in map(PurePosixPath, names) if _belongs(path, folders)))


def _belongs(path: PurePosixPath, modules: frozenset[str]) -> bool:
    top, *others = path.parts[:-1] or [""]
    if any(part.startswith(".") or part == "__pycache__" for part in (top, *others)):
        return False
    if top:
        return top in (*modules, "additional_chat_templates") or (
            path.suffix == ".py" and top not in _FOREIGN_FOLDERS
        )
    return not (
        path.name.startswith(".")
        or path.name in _LEFT_OUT
        or (path.suffix in WEIGHT_SUFFIXES and path.name not in _NO_WEIGHTS)
        or (".index." in path.name and path.suffix == ".json")
    )


def _module_folders(description: bytes | None) -> frozenset[str]:
    """Folders of sentence-transformers modules such as 1_Pooling; some of them hold small weights
    of their own.
    """
    try:
        modules = json.loads(description or b"")
        paths = [PurePosixPath(module["path"]) for module in modules]
    except (ValueError, RecursionError, TypeError, KeyError):
        return frozenset()
    return frozenset(
        path.parts[0] for path in paths if path.parts
    )  # only compared with names found in the folder
