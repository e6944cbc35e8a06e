"""Says which file names a folder cannot take.

Names of a source come from other systems. Windows reserves some, whatever their suffix, and cannot
write some characters; it and most disks of macOS take two names that differ only by case for one.
"""

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from nf4conv.system.kind import IS_POSIX

_DEVICES: Final = frozenset(
    (
        "con",
        "prn",
        "aux",
        "nul",
        "conin$",
        "conout$",
        *(f"{port}{number}" for port in ("com", "lpt") for number in "0123456789¹²³"),
    )
)
_FORBIDDEN: Final = '<>:"|?*\\'


class FolderNames:
    """Knows the names that are taken in a folder, and refuses those that it cannot take too.

    Args:
        probe: a file or folder in it that exists, whose name has letters. It is looked for in the
            other case.
        taken: names in the folder that are taken.
    """

    def __init__(self, probe: Path, taken: Iterable[str]) -> None:
        self._ignores_case = ignores_case(probe)
        self._taken = {self._key(name): name for name in taken}

    def take(self, name: str) -> str | None:
        """Takes a name, or refuses it.

        Args:
            name: the name, or a path with slashes below the folder.

        Returns:
            Why the folder cannot take it; None if it can.
        """
        if not IS_POSIX:
            for part in PurePosixPath(name).parts:
                reason = why_not_on_windows(part)
                if reason is not None:
                    return reason
        other = self._taken.setdefault(self._key(name), name)
        if other != name:
            return f"this folder takes the name for that of {other}"
        return None

    def _key(self, name: str) -> str:
        return name.casefold() if self._ignores_case else name


def ignores_case(path: Path) -> bool:
    """Returns True if a file or folder that exists is found by its name in the other case, too."""
    return path.exists() and path.with_name(path.name.swapcase()).exists()


def why_not_on_windows(name: str) -> str | None:
    """Returns why Windows has no file of a name, which has no slash; None if it could."""
    if name.partition(".")[0].rstrip(" ").casefold() in _DEVICES:
        return "Windows reserves the name for a device"
    if name.endswith((".", " ")):
        return "on Windows no name ends with a dot or a space"
    for character in name:
        if character in _FORBIDDEN or ord(character) < 32:
            return f"on Windows no name has the character {character!r}"
    return None
