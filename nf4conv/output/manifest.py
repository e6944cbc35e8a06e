"""Writes and reads the lines of SHA256SUMS, as `sha256sum` does.

A line is a checksum, a space, a space or "*", and a name. Where the name has a line break or a
backslash, those are escaped, and a backslash at the start of the line says so (GNU coreutils
manual: md5sum invocation).
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

CHECKSUMS: Final = "SHA256SUMS"
"""The file that lists the checksums of the files in its folder."""

_LINE: Final = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPES: Final = {"\\": r"\\", "\n": r"\n", "\r": r"\r"}
_MEANINGS: Final = {escape: character for character, escape in _ESCAPES.items()}


class ListedFile(NamedTuple):
    """A file, as a line lists it."""

    name: str
    sha256: str  # hexadecimal, in lower case


def line_of(name: str, sha256: str) -> str:
    """Returns the line that lists a file."""
    escaped = "".join(_ESCAPES.get(character, character) for character in name)
    mark = "\\" if escaped != name else ""
    return f"{mark}{sha256}  {escaped}"


def manifest_of(sums: Mapping[str, str]) -> str:
    """Returns the content of SHA256SUMS, given the SHA-256 of each file by its name."""
    return "".join(f"{line_of(name, sums[name])}\n" for name in sorted(sums))


def lines_in(content: str) -> list[str]:
    """Returns the lines of a manifest.

    `str.splitlines` would also end lines at characters that names may have, such as U+2028.
    """
    if not content:
        return []
    return content.removesuffix("\n").split("\n")


def listed_in(line: str) -> ListedFile | None:
    """Returns what a line lists; None if it is no checksum and name."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    mark, sha256, name = match.groups()
    if mark:
        name = re.sub(r"\\.?", _meaning, name)
    return ListedFile(name, sha256.lower())


def _meaning(escape: re.Match[str]) -> str:
    """Returns the character that an escape stands for; an unknown escape stays as it is."""
    return _MEANINGS.get(escape[0], escape[0])
