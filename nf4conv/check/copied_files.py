"""Compares the files beside the weights with those of the source: tokenizer, templates, code.

nf4conv copies them byte for byte. Other tools write some of them anew: of theirs, only the
vocabulary is compared.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from nf4conv.check.structure import Structure
from nf4conv.errors import SourceError
from nf4conv.sources.reader import digest_of, read_json
from nf4conv.sources.source import Source

CHECK: Final = "copied files"

_TOKENIZER: Final = "tokenizer.json"
_LARGEST_TOKENIZER: Final = 2**28  # bytes


def check_copied_files(structure: Structure, source: Source) -> None:
    """Notes every file beside the weights that is not the source's; with --exact, as faults."""
    names = source.auxiliary
    if not names:
        return
    with source.whole_folder() as folder:
        if structure.record is not None:
            check_files(structure, folder, names)
        elif (folder / _TOKENIZER).is_file() and (structure.folder / _TOKENIZER).is_file():
            _check_vocabulary(structure, folder / _TOKENIZER, structure.folder / _TOKENIZER)


def check_files(structure: Structure, source: Path, names: Iterable[PurePosixPath]) -> None:
    """Notes every file of a folder of ours that is not the one it was copied from."""
    for name in names:
        copy = structure.folder / name
        if not copy.is_file():
            text = "is missing; the source has it"
            structure.note(CHECK, str(name), "", text, is_fault=structure.exact)
        elif not _are_equal(source / name, copy):
            text = "is not the source's, byte for byte"
            structure.note(CHECK, str(name), "", text, is_fault=structure.exact)


def _are_equal(original: Path, copy: Path) -> bool:
    if original.stat().st_size != copy.stat().st_size:
        return False
    wanted = digest_of(original)
    try:
        return digest_of(copy) == wanted
    except SourceError:  # the copy cannot be read
        return False


def _check_vocabulary(structure: Structure, original: Path, copy: Path) -> None:
    """Notes a tokenizer that gives the tokens of the source other numbers; it may have more."""
    wanted = _vocabulary(read_json(original, _LARGEST_TOKENIZER))
    try:
        found = _vocabulary(read_json(copy, _LARGEST_TOKENIZER))
    except SourceError as error:
        structure.note_unreadable(CHECK, copy, error)
        return
    if any(found.get(token) != number for token, number in wanted.items()):
        structure.note(CHECK, _TOKENIZER, "", "has another vocabulary than the source's")


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of tokens, as far as a tokenizer.json spells them out."""
    model = tokenizer.get("model")
    table = model.get("vocab") if isinstance(model, Mapping) else None
    vocabulary = dict(table) if isinstance(table, Mapping) else {}
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, Mapping):
            vocabulary[str(token.get("content"))] = token.get("id")
    return vocabulary
