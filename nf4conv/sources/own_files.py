"""Tells which files of a folder are its own.

A folder may come from a stranger, and a link in it may lead to /etc or /proc. nf4conv follows only
two kinds of links: those that stay inside the folder that the user named, and those to blobs of the
Hub's cache, of which a snapshot consists: CACHE/models--org--name/snapshots/COMMIT/config.json →
CACHE/models--org--name/blobs/HASH.
"""

import stat
from pathlib import Path

from nf4conv.errors import SourceError


def is_file(path: Path) -> bool:
    """Returns True if there is a regular file, or a link to one.

    Raises:
        OSError: the folder may not be entered, or the name is too long; Path.is_file of Python 3.14
            returns False then.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except ValueError:  # a name with a zero byte
        return False


def leads_out(path: Path, root: Path) -> Path | None:
    """Returns where a file is that a link makes appear in a folder that it does not belong to.

    Args:
        path: the file.
        root: the folder that the user named.

    Returns:
        The file that the link leads to; None for a file that belongs to the folder.
    """
    if path.parent == root and not path.is_symlink():
        return None
    target = path.resolve()
    top = root.resolve()
    around = {target, *target.parents}
    if top in around:
        return None
    is_cached = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    if is_cached or any(parent / "blobs" in around for parent in top.parents):
        return None
    return target


def require_own(path: Path, root: Path) -> Path:
    """Returns the path of a file that a checkpoint needs.

    Args:
        path: the file.
        root: the folder that the user named.

    Raises:
        SourceError: the file is a link that leads out of the folder.
    """
    target = leads_out(path, root)
    if target is not None:
        raise SourceError(
            f"{path}: a link that leads out of {root}, to {target}; put the file itself there",
            path=path,
        )
    return path


def own_files(folder: Path, root: Path) -> tuple[list[str], list[str]]:
    """Lists the regular files below a folder.

    Args:
        folder: the folder.
        root: the folder that it lies in, and that links may not lead out of.

    Returns:
        own: the paths of its files, relative to the folder.
        strays: the paths of links that lead out of `root`.
    """
    own = []
    strays = []
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        if leads_out(path, root) is None:
            own.append(name)
        else:
            strays.append(name)
    return own, strays
