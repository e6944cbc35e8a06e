"""Reads the text that calibrates a model, as token ids.

A text is a file, or "default" for what nf4conv ships:

    .txt      UTF-8 text
    .jsonl    a JSON object a line: {"text": …}, or {"messages": […]} of a chat, which takes the
              form that the tokenizer's template gives it
    .npy      token ids: an array of integers with one dimension, which needs no tokenizer

"FILE=SHARE" says what share of the tokens a text has beside others.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nf4conv.calibrate.model.building import first_line
from nf4conv.errors import PlanError, named
from nf4conv.sources.reader import digest_of

DEFAULT: Final = "default"
"""Names the texts that nf4conv ships."""

_SHIPPED: Final = Path(__file__).with_name("texts")
_SUFFIXES: Final = (".txt", ".jsonl", ".npy")

_CHARACTERS: Final = 16  # of text that are read for a token that is wanted
_PARTS: Final = 64  # of a long text that are read, at equal distances

_MOST_UNKNOWN: Final = 0.5  # share of tokens that stand for what a tokenizer does not know

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Wanted:
    """A text as the user named it."""

    place: str
    # what share of the tokens it has, relative to the shares of other texts
    share: float


@dataclass(frozen=True)
class Text:
    """A text that has been read."""

    # the file's own name
    name: str
    share: float
    # of the file
    sha256: str
    ids: Ids


def wanted_texts(places: Sequence[str]) -> list[Wanted]:
    """Returns the texts that --calibrate names; "default" becomes the files that nf4conv ships.

    Raises:
        PlanError: one of them is no file that can be read.
    """
    found: list[Wanted] = []
    for place in places:
        wanted = _parse(place)
        if wanted.place != DEFAULT:
            _require_file(wanted.place)
            found.append(wanted)
            continue
        shipped = _shipped()
        share = wanted.share / len(shipped)
        found.extend(Wanted(str(path), share) for path in shipped)
    return found


def _parse(place: str) -> Wanted:
    """Divides "FILE=SHARE"; a file may have such a name, too."""
    head, sign, tail = place.rpartition("=")
    if not sign or Path(place).exists():
        return Wanted(place, 1.0)
    try:
        share = float(tail)
    except ValueError:
        return Wanted(place, 1.0)
    if not (math.isfinite(share) and share > 0):
        raise PlanError(f"--calibrate {place}: the share {tail} is not a positive number")
    return Wanted(head, share)


def _shipped() -> list[Path]:
    found = [path for path in sorted(_SHIPPED.glob("*")) if path.suffix in _SUFFIXES]
    if not found:
        raise PlanError("--calibrate default: this build of nf4conv ships no text; name a file")
    return found


def _require_file(place: str) -> None:
    """Raises a PlanError if a text is no file that can be read, and says what to give instead."""
    path = Path(place)
    if path.is_file():
        if path.suffix in _SUFFIXES:
            return
        kinds = ", ".join(_SUFFIXES)
        raise PlanError(f"--calibrate {place}: expected a file that ends in {kinds}")
    if path.exists():
        raise PlanError(f"--calibrate {place}: expected a file, and this is a folder")
    if place.count("/") == 1 and not place.startswith((".", "/")):
        raise PlanError(
            f"--calibrate {place}: no such file; a data set on the Hub is not fetched: save some "
            f"megabytes of its text as .txt or .jsonl, or take --calibrate default"
        )
    raise PlanError(f"--calibrate {place}: no such file; name one, or take --calibrate default")


def read_texts(wanted: Sequence[Wanted], tokens: int, tokenizer: Callable[[], Any]) -> list[Text]:
    """Reads texts, as many tokens of each as its share takes, or all if it has fewer.

    Args:
        wanted: the texts.
        tokens: the number of tokens that are needed of all texts together.
        tokenizer: returns the model's tokenizer, or raises a PlanError. It is called only for texts
            that need one.

    Raises:
        PlanError: a text cannot be read or tokenized, is empty, or strange to the model.
    """
    whole = sum(text.share for text in wanted)
    found = []
    for text in wanted:
        path = Path(text.place)
        needed = math.ceil(tokens * text.share / whole)
        if path.suffix == ".npy":
            ids = read_ids(path).astype(np.int64)
            if ids.ndim != 1:
                raise PlanError(f"{path}: expected token ids: integers in one dimension", path=path)
        else:
            ids = _tokenized(path, needed, tokenizer())
        if ids.size == 0:
            raise PlanError(f"{path}: holds no tokens, so it cannot calibrate a model", path=path)
        with named(path, PlanError):
            digest = digest_of(path)
        found.append(Text(path.name, text.share / whole, digest, ids))
    return found


def read_ids(path: Path) -> npt.NDArray[np.integer[Any]]:
    """Reads token ids; a large file is mapped, not read.

    Returns:
        Integers of any type, in one dimension or more.

    Raises:
        PlanError: they are no integers, or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise PlanError(f"{path}: is no file", path=path)  # numpy would wait at a pipe
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises anything for what is no array
        raise PlanError(
            f"{path}: is no array of numpy that can be read ({first_line(error)})", path=path
        ) from error
    if not isinstance(ids, np.ndarray) or ids.ndim < 1 or ids.dtype.kind not in "iu":
        raise PlanError(f"{path}: expected token ids: an array of integers", path=path)
    return ids


def _tokenized(path: Path, needed: int, tokenizer: Any) -> Ids:
    """Returns the ids of a text, or of parts of a long one."""
    ids: list[int] = []
    most = _CHARACTERS * needed
    pieces = _messages_or_texts(path, tokenizer) if path.suffix == ".jsonl" else _parts(path, most)
    try:
        for piece, is_chat in pieces:
            # a template has written a chat's special tokens already
            encoded = tokenizer(piece, add_special_tokens=not is_chat, verbose=False)
            ids += encoded["input_ids"]
            if len(ids) > 4 * needed:
                break
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise PlanError(
            f"{path}: the model's tokenizer cannot read it ({error})", path=path
        ) from error
    found = np.array(ids, dtype=np.int64)
    unknown = int((found == getattr(tokenizer, "unk_token_id", None)).sum())
    if unknown > _MOST_UNKNOWN * found.size:
        raise PlanError(
            f"{path}: the model's tokenizer knows only {found.size - unknown:,} of {found.size:,} "
            f"tokens of it; give text in a language that the model has learnt",
            path=path,
        )
    return found


def _parts(path: Path, most: int) -> Iterator[tuple[str, bool]]:
    """Yields a text; of a long one, parts from all over it."""
    content = _decoded(path)
    if len(content) <= most:
        yield content, False
        return
    length = max(most // _PARTS, 1)
    for number in range(_PARTS):
        start = (len(content) - length) * number // (_PARTS - 1)
        yield content[start : start + length], False


def _decoded(path: Path) -> str:
    """Reads a text; raises a PlanError if it is not UTF-8."""
    try:
        with named(path, PlanError):
            content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path}: is no UTF-8 text; convert it, or give token ids (.npy)", path=path
        ) from error
    if "\0" in content:
        raise PlanError(f"{path}: holds zero bytes, as no text does", path=path)
    return content


def _messages_or_texts(path: Path, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """Yields the texts of a .jsonl file, and whether a chat template has written them."""
    for number, line in enumerate(_decoded(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path}: line {number} is not JSON: {error}", path=path) from error
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            yield entry["text"], False
        elif isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            yield _chat(path, number, entry["messages"], tokenizer), True
        else:
            raise PlanError(f'{path}: line {number} has neither "text" nor "messages"', path=path)


def _chat(path: Path, number: int, messages: list[Any], tokenizer: Any) -> str:
    """Returns the messages of a line in the form that the tokenizer's chat template gives them."""
    if not getattr(tokenizer, "chat_template", None):
        if path.parent == _SHIPPED:  # base models have no template, and are to be calibrated, too
            return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
        raise PlanError(
            f"{path}: line {number} is a chat, but the model's tokenizer has no chat template; "
            f'give texts: {{"text": …}}',
            path=path,
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program, and may raise anything
        raise PlanError(
            f"{path}: line {number}: the model's chat template refuses it ({error})", path=path
        ) from error
