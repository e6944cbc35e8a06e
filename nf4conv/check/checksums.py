"""Checks SHA256SUMS against the files that it lists."""

import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from nf4conv.errors import OutputError, SourceError
from nf4conv.output.writer import write_file
from nf4conv.sources.reader import digest_of
from nf4conv.sources.stored_weights import Structure

_MANIFEST: Final = "SHA256SUMS"
_LONGEST_MANIFEST: Final = 2**24  # characters
_LINE: Final = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_DIGITS: Final = 64  # of a SHA-256 in hexadecimal


class _Entry(NamedTuple):
    """Holds a line of the manifest."""

    name: str
    sha256: str  # hexadecimal, in lower case


def check_checksums(
    structure: Structure, workers: int, weights: Collection[Path] | None = None
) -> bool:
    """Notes every file that is not what the manifest says.

    Args:
        structure: the checkpoint.
        workers: threads that read files.
        weights: the files that must be listed; None for those that hold its tensors.

    Returns:
        True if there is a manifest.
    """
    manifest = structure.folder / _MANIFEST
    if not manifest.is_file():
        return False
    listed = list(_entries(structure, manifest))
    names = {entry.name for entry in listed}
    if weights is None:
        weights = {tensor.file for tensor in structure.tensors.values()}
    for file in sorted(weights):
        if file.name not in names:
            structure.note("checksums", file, "", f"is not in {manifest.name}")
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(_sha256, [manifest.parent / entry.name for entry in listed])
        for entry, sha256 in zip(listed, found, strict=True):
            if sha256 == entry.sha256:
                continue
            is_readable = len(sha256) == _DIGITS
            text = "is not the file that was listed" if is_readable else sha256
            structure.note("checksums", entry.name, "", text)
    return True


def _entries(structure: Structure, manifest: Path) -> Iterator[_Entry]:
    """Yields the lines of a manifest, and notes those that are wrong."""
    with manifest.open(encoding="utf-8", errors="surrogateescape") as file:
        lines = file.read(_LONGEST_MANIFEST).splitlines()
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is not None and _is_in_this_folder(match[2]):
            yield _Entry(match[2], match[1].lower())
        else:
            text = f"line {number} is not a checksum and a name in this folder"
            structure.note("checksums", manifest, "", text)


def _is_in_this_folder(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _sha256(path: Path) -> str:
    """Returns the checksum of a file, in hexadecimal; or a text that says why it has none."""
    if path.exists() and not path.is_file():
        return "is no file"
    try:
        return digest_of(path)
    except SourceError as error:
        return str(error).removeprefix(f"{path}: ")


def renew_checksum(folder: Path, name: str) -> None:
    """Writes what a file is now into SHA256SUMS, if there is one.

    Args:
        folder: the checkpoint.
        name: the file.

    Raises:
        OutputError: the manifest cannot be written.
    """
    manifest = folder / _MANIFEST
    if not manifest.is_file():
        return
    if manifest.stat().st_size > _LONGEST_MANIFEST:
        raise OutputError(f"{manifest}: longer than any list of checksums; remove it")
    entries_of_file = (f"  {name}", f" *{name}")
    lines = [
        line
        for line in manifest.read_text("utf-8", "surrogateescape").splitlines()
        if line[_DIGITS:] not in entries_of_file
    ]
    lines.append(f"{_sha256(folder / name)}  {name}")
    lines.sort(key=_name_in)
    content = "".join(f"{line}\n" for line in lines)
    write_file(manifest, [content.encode("utf-8", "surrogateescape")])


def _name_in(line: str) -> str:
    """Returns the name in a line of a manifest."""
    return line[_DIGITS + 2 :]
