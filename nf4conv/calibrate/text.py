"""Reads the text that calibrates a model, before torch and transformers are imported.

A text is a file, or "default" for the files that nf4conv ships:

    .txt      UTF-8 text
    .jsonl    a JSON object a line: {"text": …}, or {"messages": […]} of a chat, which is written
              out as "role: content"; no template of the checkpoint runs
    .npy      token ids: an array of integers, which needs no tokenizer
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nf4conv.errors import PlanError, named
from nf4conv.sources.reader import digest_of, read_ids

DEFAULT: Final = "default"
"""Names the texts that nf4conv ships."""

_SHIPPED: Final = Path(__file__).with_name("texts")
_SUFFIXES: Final = (".txt", ".jsonl", ".npy")

_CHARACTERS: Final = 16  # of text that are read for a token that is wanted
_PARTS: Final = 64  # of a long text that are read, at equal distances

Ids = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Text:
    """A file that has been read.

    Attributes:
        path: the file.
        sha256: the SHA-256 of the file.
        ids: its token ids; None if the tokenizer has to make them.
        passages: its text, as the tokenizer reads it; nothing for a file of token ids.
    """

    path: Path
    sha256: str
    ids: Ids | None
    passages: Sequence[str]

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.path.name


def read_texts(place: str) -> list[Text]:
    """Reads the text that --calibrate names."""
    if place == DEFAULT:
        return [_read(path) for path in sorted(_SHIPPED.glob("*.jsonl"))]
    path = Path(place)
    if not path.is_file() or path.suffix not in _SUFFIXES:
        raise PlanError(
            f"--calibrate {place}: expected a file that ends in {', '.join(_SUFFIXES)}, or default"
        )
    return [_read(path)]


def _read(path: Path) -> Text:
    ids = None
    passages: list[str] = []
    if path.suffix == ".npy":
        ids = read_ids(path).reshape(-1)  # windows are read one behind the other
    elif path.suffix == ".jsonl":
        passages += _lines(path)
    else:
        passages.append(_decoded(path))
    with named(path, PlanError):
        return Text(path, digest_of(path), ids, passages)


def _decoded(path: Path) -> str:
    """Reads a text; raises a PlanError if it is not UTF-8."""
    try:
        with named(path, PlanError):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path}: is no UTF-8 text; convert it, or give token ids (.npy)", path=path
        ) from error


def _lines(path: Path) -> Iterator[str]:
    """Yields the texts of a .jsonl file, and its chats written out."""
    # only a line feed ends a line of JSON: str.splitlines knows others, which strings may hold
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield _passage(json.loads(line))
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            raise PlanError(
                f'{path}: line {number} is no JSON object with "text", or with "messages" that '
                f'have "role" and "content"',
                path=path,
            ) from error


def _passage(entry: Any) -> str:
    """Returns the text of a line, or its chat written out; raises TypeError or KeyError."""
    if "text" not in entry:
        return "\n\n".join(f"{said['role']}: {said['content']}" for said in entry["messages"])
    text = entry["text"]
    if not isinstance(text, str):
        raise TypeError
    return text


def tokenized(text: Text, needed: int, tokenizer: Any) -> Ids:
    """Returns the ids of a text, or of parts of a long one, of which so many are needed."""
    path = text.path
    ids: list[int] = []
    passages = text.passages
    if path.suffix == ".txt":
        passages = _parts(passages[0], _CHARACTERS * needed)
    try:
        for passage in passages:
            ids += tokenizer(passage, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) > 4 * needed:
                break
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise PlanError(
            f"{path}: the model's tokenizer cannot read it ({error})", path=path
        ) from error
    return np.array(ids, dtype=np.int64)


def _parts(whole: str, most: int) -> list[str]:
    """Returns a text; of a long one, parts from all over it."""
    if len(whole) <= most:
        return [whole]
    length = max(most // _PARTS, 1)
    parts = []
    for number in range(_PARTS):
        start = (len(whole) - length) * number // (_PARTS - 1)
        parts.append(whole[start : start + length])
    return parts


def require_known(ids: Ids, vocabulary: int, name: str, model: str) -> None:
    """Raises a PlanError if token ids of a text are not those of a model with so many tokens."""
    least = int(ids.min())
    largest = int(ids.max())
    if least < 0 or largest >= vocabulary:
        wrong = least if least < 0 else largest
        raise PlanError(
            f"{name}: holds the token id {wrong:,}, but {model} has {vocabulary:,} tokens"
        )
