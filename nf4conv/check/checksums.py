"""SHA256SUMS held against the files it lists."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from nf4conv.errors import SourceError
from nf4conv.output.writer import write_file
from nf4conv.sources.reader import digest_of
from nf4conv.sources.stored_weights import Structure

_LONGEST = 2**24
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def check_checksums(structure: Structure, workers: int) -> bool:
    """Note every file that is not what the manifest says; False if there is no manifest."""
    manifest = structure.folder / "SHA256SUMS"
    if not manifest.is_file():
        return False
    listed = list(_entries(structure, manifest))
    names = {name for name, _ in listed}
    for file in sorted({tensor.file for tensor in structure.tensors.values()}):
        if file.name not in names:
            structure.note("checksums", file, "", f"is not in {manifest.name}")
    with ThreadPoolExecutor(workers) as pool:
        sums = pool.map(_sha256, [manifest.parent / name for name, _ in listed])
        for (name, expected), found in zip(listed, sums, strict=True):
            if found != expected:
                structure.note(
                    "checksums",
                    name,
                    "",
                    found if len(found) != 64 else "is not the file that was listed",
                )
    return True


def _entries(structure: Structure, manifest: Path) -> Iterator[tuple[str, str]]:
    with manifest.open(errors="surrogateescape") as file:
        lines = file.read(_LONGEST).splitlines()
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        path = PurePosixPath(match[2]) if match else None
        if (
            match is None
            or path is None
            or path.is_absolute()
            or ".." in path.parts
            or "\0" in line
        ):
            structure.note(
                "checksums",
                manifest,
                "",
                f"line {number} is not a checksum and a name in this folder",
            )
        else:
            yield match[2], match[1].lower()


def _sha256(path: Path) -> str:
    """The checksum of a file, or why it has none."""
    if path.exists() and not path.is_file():
        return "is no file"
    try:
        return digest_of(path)
    except SourceError as error:
        return str(error).removeprefix(f"{path}: ")


def renew_checksum(folder: Path, name: str) -> None:
    """Let SHA256SUMS, if there is one, say what a file is now."""
    manifest = folder / "SHA256SUMS"
    if manifest.is_file():
        kept = [
            line
            for line in manifest.read_text().splitlines()
            if line[64:] not in (f"  {name}", f" *{name}")
        ]
        lines = sorted([*kept, f"{_sha256(folder / name)}  {name}"], key=lambda line: line[66:])
        write_file(manifest, ["".join(f"{line}\n" for line in lines).encode()])
