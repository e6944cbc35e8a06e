"""Which files of a folder are its own. A folder may come from a stranger, and a link in it lead to
/etc or /proc.

Links are followed that stay inside the folder that the user named, or that lead to blobs of the
Hub's cache, of which a snapshot consists: CACHE/models--org--name/snapshots/COMMIT/config.json →
CACHE/models--org--name/blobs/HASH.
"""

import stat
from pathlib import Path

from nf4conv.errors import SourceError


def is_file(path: Path) -> bool:
    """An OSError of a folder that may not be entered, or a name too long, where Path.is_file of
    3.14 sees none.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
    ):  # the last of a name with a zero byte
        return False


def leads_out(path: Path, root: Path) -> Path | None:
    """Where a file is that a link makes appear in a folder that it does not belong to; None of one
    that does.
    """
    if path.parent == root and not path.is_symlink():
        return None
    target, top = path.resolve(), root.resolve()
    around = {target, *target.parents}
    is_cached = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if is_cached or top in around or any(parent / "blobs" in around for parent in top.parents):
        return None
    return target


def require_own(path: Path, root: Path) -> Path:
    """The path of a file that a checkpoint needs; a SourceError if it is a link that leads out of
    the folder.
    """
    target = leads_out(path, root)
    if target is not None:
        raise SourceError(
            f"{path}: a link that leads out of {root}, to {target}; put the file itself there"
        )
    return path


def own_files(folder: Path, root: Path) -> tuple[list[str], list[str]]:
    """The regular files below a folder, and the links that lead out of the root that it lies in, by
    relative path.
    """
    names: tuple[list[str], list[str]] = [], []
    for path in folder.rglob("*"):
        if path.is_file():
            names[leads_out(path, root) is not None].append(path.relative_to(folder).as_posix())
    return names
