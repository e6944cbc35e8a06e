"""Checks SHA256SUMS against the files that it lists."""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Final

from nf4conv.errors import OutputError, SourceError
from nf4conv.output.manifest import CHECKSUMS, ListedFile, line_of, lines_in, listed_in
from nf4conv.output.writer import write_file
from nf4conv.sources.reader import digest_of
from nf4conv.sources.stored_weights import Structure

_LONGEST_MANIFEST: Final = 2**24  # characters


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
    manifest = structure.folder / CHECKSUMS
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
        faults = pool.map(lambda entry: _fault_of(structure.folder, entry), listed)
        for entry, fault in zip(listed, faults, strict=True):
            if fault is not None:
                structure.note("checksums", entry.name, "", fault)
    return True


def _entries(structure: Structure, manifest: Path) -> Iterator[ListedFile]:
    """Yields what a manifest lists, and notes the lines that are wrong."""
    with manifest.open(encoding="utf-8", errors="surrogateescape") as file:
        lines = lines_in(file.read(_LONGEST_MANIFEST))
    for number, line in enumerate(lines, start=1):
        entry = listed_in(line)
        if entry is not None and _is_in_this_folder(entry.name):
            yield entry
        else:
            text = f"line {number} is not a checksum and a name in this folder"
            structure.note("checksums", manifest, "", text)


def _is_in_this_folder(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _fault_of(folder: Path, entry: ListedFile) -> str | None:
    """Returns what is wrong with a file that is listed; None if it is the one that was listed."""
    path = folder / entry.name
    if path.exists() and not path.is_file():
        return "is no file"
    try:
        found = digest_of(path)
    except SourceError as error:
        return str(error).removeprefix(f"{path}: ")
    return None if found == entry.sha256 else "is not the file that was listed"


def renew_checksum(folder: Path, name: str) -> None:
    """Writes what a file is now into SHA256SUMS, if there is one.

    Args:
        folder: the checkpoint.
        name: the file.

    Raises:
        OutputError: the manifest cannot be written.
        SourceError: the file cannot be read.
    """
    manifest = folder / CHECKSUMS
    if not manifest.is_file():
        return
    if manifest.stat().st_size > _LONGEST_MANIFEST:
        raise OutputError(
            f"{manifest}: longer than any list of checksums; remove it", path=manifest
        )
    before = lines_in(manifest.read_text("utf-8", "surrogateescape"))
    lines = [line for line in before if _name_in(line) != name]
    lines.append(line_of(name, digest_of(folder / name)))
    lines.sort(key=_name_in)
    content = "".join(f"{line}\n" for line in lines)
    write_file(manifest, [content.encode("utf-8", "surrogateescape")])


def _name_in(line: str) -> str:
    """Returns the name that a line lists; the line itself if it lists none."""
    entry = listed_in(line)
    return line if entry is None else entry.name
