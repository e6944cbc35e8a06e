"""Compares the files beside the weights with those of the source: tokenizer, templates, code.

nf4conv copies them byte for byte. Other tools write some of them anew from what they parsed; these
are compared by what they mean as far as that is known, and otherwise only noted.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from nf4conv.errors import SourceError
from nf4conv.output.folder import OWN_NAMES
from nf4conv.sources.own_files import is_file
from nf4conv.sources.reader import digest_of, read_json
from nf4conv.sources.record import MAKING
from nf4conv.sources.source import Source
from nf4conv.sources.stored_weights import Structure
from nf4conv.system.names import FolderNames

CHECK: Final = "copied files"

_LARGEST_JSON: Final = 2**28  # bytes of a tokenizer

_REWRITTEN: Final = frozenset(
    (
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "image_processor_config.json",
        "chat_template.json",
        "chat_template.jinja",
        "tokenizer.json",
        "merges.txt",
        "vocab.txt",
    )
)
"""Files that save_pretrained of models, tokenizers and processors writes anew."""

_VERSIONS: Final = ("transformers_version", "_from_model_config", "tokenizers_version")


def check_copied_files(structure: Structure, source: Source) -> None:
    """Notes every file beside the weights that is not the source's.

    Args:
        structure: the checkpoint, a folder.
        source: what it was made from.

    Raises:
        SourceError: a file of the source cannot be read.
    """
    names = source.auxiliary()
    if not names:
        return
    is_ours = structure.record is not None
    with source.whole_folder() as folder:
        check_files(structure, folder, names, is_ours=is_ours)


def check_files(
    structure: Structure, source: Path, names: Iterable[PurePosixPath], *, is_ours: bool
) -> None:
    """Notes every file of a folder that is not the one that it should have been copied from.

    Args:
        structure: the folder, which gets the findings.
        source: the folder that files were copied from.
        names: their paths, relative to both.
        is_ours: True if nf4conv wrote the folder.

    Raises:
        SourceError: a file of the source cannot be read.
    """
    taken = FolderNames(structure.folder / MAKING, OWN_NAMES)
    for name in names:
        if taken.take(str(name)) is not None:
            continue  # it could not be copied
        original = source / name
        copy = structure.folder / name
        if not is_file(copy):
            text = "is missing; the source has it"
            structure.note(CHECK, str(name), "", text, is_fault=is_ours)
        elif not _are_equal(structure, original, copy, str(name)):
            _note_difference(structure, original, copy, str(name), is_ours=is_ours)


def _are_equal(structure: Structure, original: Path, copy: Path, name: str) -> bool:
    """Returns True if two files have the same bytes; notes a copy that cannot be read."""
    if original.stat().st_size != copy.stat().st_size:
        return False
    wanted = digest_of(original)
    try:
        return digest_of(copy) == wanted
    except SourceError as error:
        structure.note(CHECK, name, "", str(error).removeprefix(f"{copy}: "))
        return True


def _note_difference(
    structure: Structure, original: Path, copy: Path, name: str, *, is_ours: bool
) -> None:
    if is_ours or name not in _REWRITTEN:
        structure.note(CHECK, name, "", "is not the source's, byte for byte")
        return
    differing = list(_changed_keys(original, copy))
    if name == "tokenizer.json" and {"model", "added_tokens"} & {*differing}:
        structure.note(CHECK, name, "", "has another vocabulary than the source's")
    elif differing:
        text = (
            f"was written by another tool, and differs from the source's in "
            f"{', '.join(differing[:5])}"
        )
        structure.note(CHECK, name, "", text, is_fault=False)


def _changed_keys(original: Path, copy: Path) -> Iterator[str]:
    """Yields the keys of a JSON file that another tool has changed; "its bytes" of other files."""
    try:
        wanted = read_json(original, _LARGEST_JSON)
        found = read_json(copy, _LARGEST_JSON)
    except SourceError:
        yield "its bytes"
        return
    for key, value in wanted.items():
        if key in _VERSIONS or (key not in found and value is None):
            continue
        if key not in found or not _mean_the_same(key, value, found[key]):
            yield key


def _mean_the_same(key: str, wanted: object, value: object) -> bool:
    """Compares two values of tokenizer.json, whatever release of tokenizers wrote them.

    Tools may add tokens of their own, such as one for padding.
    """
    if key == "added_tokens" and isinstance(wanted, list) and isinstance(value, list):
        tokens = [_token(token) for token in value]
        return all(_token(token) in tokens for token in wanted)
    return _meaning(key, wanted) == _meaning(key, value)


def _meaning(key: str, value: object) -> str:
    if key == "model" and isinstance(value, Mapping):
        value = {"vocab": value.get("vocab"), "merges": _merges(value.get("merges"))}
    return json.dumps(value, sort_keys=True)


def _merges(merges: object) -> object:
    """Returns merges as pairs; releases before 0.20 write them as texts with a space."""
    if not isinstance(merges, list):
        return merges
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def _token(token: Any) -> object:
    return [token.get("id"), token.get("content")] if isinstance(token, Mapping) else token
