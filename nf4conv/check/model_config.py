"""Compares config.json with that of the source: does it still describe the same model?

nf4conv copies every key but those of the quantization and of dtypes, and adds those that only one
release of transformers reads. Other tools rewrite more: they parse the source's config and write it
again, with defaults added or left out and keys renamed. model_keys.py lists what that changes
without changing the model.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nf4conv.check import model_keys
from nf4conv.choose.formats import dominant_dtype
from nf4conv.errors import SourceError
from nf4conv.models.config import (
    DTYPE_KEYS,
    LEFTOVERS,
    checkpoint_dtype,
    plain_config,
    without_quantization,
)
from nf4conv.models.releases import with_keys_of_both
from nf4conv.sources.reader import read_json
from nf4conv.sources.source import Source
from nf4conv.sources.stored_weights import Structure

CHECK: Final = "model config"

_FIRST_SCHEMA: Final = 1
"""Is the schema of nf4conv.json that release 0.1.0 wrote; it added no keys to config.json."""

_MISSING: Final = object()


@dataclass(frozen=True)
class _Difference:
    """A key of config.json that is not what it should be."""

    path: str  # the keys that lead to it, with dots between them
    text: str


def check_model_config(structure: Structure, source: Source, *, exact: bool) -> None:
    """Notes every key by which config.json describes another model than the source's.

    Args:
        structure: the checkpoint, a folder.
        source: what it was made from.
        exact: True to look at every key; False to look at those only that decide shapes and
            arithmetic.
    """
    if source.config is None:
        return
    try:
        config = _read_config(structure)
    except SourceError as error:
        if not structure.weights:  # otherwise it is noted with what else is wrong with it
            structure.note(CHECK, "config.json", "", str(error).partition(": ")[2])
        return
    if config is None:
        if exact:
            structure.note(CHECK, "config.json", "", "is missing; the source has one")
        return
    record = structure.record
    if record is None:
        found = _differences_of_others(source.config, config, _dtypes_of(structure), "")
    else:
        found = _differences_of_ours(structure, source, config, record)
    _note_differences(structure, found, exact=exact)


def check_planned_config(
    structure: Structure, planned: Mapping[str, Any] | None, *, exact: bool
) -> None:
    """Notes every key by which config.json is not the one that decoding the source gives.

    A quantization that is left over is noted elsewhere, as is a file that cannot be read.

    Args:
        structure: the checkpoint, a folder.
        planned: the config that decoding gives. None for a source without one.
        exact: True to look at every key; False to look at those only that decide shapes and
            arithmetic.
    """
    if planned is None:
        return
    try:
        config = _read_config(structure)
    except SourceError:
        return
    if config is None:
        structure.note(CHECK, "config.json", "", "is missing; decoding the source gives one")
        return
    config = {key: value for key, value in config.items() if key in planned or key not in LEFTOVERS}
    if structure.record is None:
        found = _differences_of_others(planned, config, set(), "")
    else:
        found = _unequal(planned, config, "")
    _note_differences(structure, found, exact=exact)


def _note_differences(structure: Structure, found: Iterable[_Difference], *, exact: bool) -> None:
    for difference in found:
        name = difference.path.rpartition(".")[2]
        if exact or name not in model_keys.NOT_ARITHMETIC:
            structure.note(CHECK, "config.json", "", f"{difference.path} {difference.text}")


def check_model_index(around: Structure, index: Path, *, exact: bool) -> None:
    """Notes every key by which model_index.json describes another pipeline than the source's.

    Args:
        around: the folder of the pipeline, which gets the findings.
        index: the model_index.json of the source.
        exact: True to look at every key, those that the source lacks too.

    Raises:
        SourceError: one of the two cannot be read.
    """
    wanted = read_json(index)
    found = read_json(around.folder / index.name)
    for difference in _unequal(wanted, found, ""):
        is_rewritten = difference.path in model_keys.REWRITTEN or difference.path not in wanted
        if exact or not is_rewritten:
            around.note(CHECK, index.name, "", f"{difference.path} {difference.text}")


def _read_config(structure: Structure) -> Mapping[str, Any] | None:
    path = structure.folder / "config.json"
    return read_json(path) if path.is_file() else None


def _dtypes_of(structure: Structure) -> set[str]:
    """Returns the dtypes that weights had before they were packed."""
    return {weight.format.dtype for weight in structure.weights.values()}


def _differences_of_ours(
    structure: Structure, source: Source, config: Mapping[str, Any], record: Mapping[str, Any]
) -> Iterator[_Difference]:
    """Yields what nf4conv would have written otherwise; quantization_config is checked elsewhere.

    A submodel of a diffusers pipeline in which nothing is packed has the config of the source.
    """
    assert source.config is not None
    if not structure.weights:
        yield from _unequal(source.config, config, "")
        return
    found = {key: value for key, value in config.items() if key != "quantization_config"}
    plain = without_quantization(source.config)
    expected = with_keys_of_both(plain)
    if "_class_name" not in source.config:  # diffusers does not know dtypes
        dtype = _dtype_of(source, record)
        plain = plain_config(plain, dtype)
        expected = plain_config(expected, dtype)
    is_first = record.get("schema_version", _FIRST_SCHEMA) == _FIRST_SCHEMA
    if is_first and not any(_unequal(plain, found, "")):
        return
    yield from _unequal(expected, found, "")


def _dtype_of(source: Source, record: Mapping[str, Any]) -> str:
    """Returns the dtype that nf4conv writes, as choose/formats.py chooses it."""
    asked = record["options"].get("dtype")
    if isinstance(asked, str):
        return asked
    return checkpoint_dtype(source.config or {}) or dominant_dtype(source.tensors)


def _unequal(
    expected: Mapping[str, Any], found: Mapping[str, Any], path: str
) -> Iterator[_Difference]:
    """Yields every key of two configs whose values are not spelled alike."""
    for key in {**expected, **found}:
        place = f"{path}{key}"
        wanted = expected.get(key, _MISSING)
        value = found.get(key, _MISSING)
        if isinstance(wanted, Mapping) and isinstance(value, Mapping):
            yield from _unequal(wanted, value, f"{place}.")
        elif _shown(wanted) != _shown(value):
            yield _difference(place, wanted, value)


def _difference(path: str, wanted: object, value: object) -> _Difference:
    if wanted is _MISSING:
        return _Difference(path, f"is {_shown(value):.100}; the source has no such key")
    return _Difference(path, f"is {_shown(value):.100}; by the source it is {_shown(wanted):.100}")


def _shown(value: object) -> str:
    return "missing" if value is _MISSING else json.dumps(value)


def _differences_of_others(
    source: Mapping[str, Any], config: Mapping[str, Any], dtypes: set[str], path: str
) -> Iterator[_Difference]:
    """Yields what changes the model in a config that another tool wrote.

    Args:
        source: a level of the source's config.
        config: the same level of the config.
        dtypes: those that the weights had before they were packed.
        path: the keys that lead to this level, each with a dot after it.
    """
    named = [source[key] for key in DTYPE_KEYS if source.get(key) is not None]
    for key in DTYPE_KEYS:
        value = config.get(key)
        if named and value is not None and not _is_dtype(value, named[0], dtypes):
            yield _difference(f"{path}{key}", named[0], value)
    for key, wanted in source.items():
        place = f"{path}{key}"
        value = config.get(key, _MISSING)
        if key in (*LEFTOVERS, *DTYPE_KEYS, *model_keys.REWRITTEN) or wanted is None:
            continue
        if isinstance(wanted, Mapping) and isinstance(value, Mapping):
            yield from _differences_of_others(wanted, value, dtypes, f"{place}.")
        elif value is _MISSING:
            if not model_keys.may_be_left_out(key, wanted, config):
                yield _difference(place, wanted, value)
        elif not model_keys.means_the_same(key, wanted, value, is_part=bool(path)):
            yield _difference(place, wanted, value)


def _is_dtype(value: object, wanted: object, dtypes: set[str]) -> bool:
    """Returns True for the dtype of the source, or of the weights that were packed."""
    name = str(value).removeprefix("torch.")
    return name == str(wanted).removeprefix("torch.") or name in dtypes
