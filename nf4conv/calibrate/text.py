"""Reads the text that calibrates a model, and cuts it into windows of tokens, of which some
calibrate and others judge. It imports neither torch nor transformers.

A text is a file, or "default" for the files that nf4conv ships:

    .txt      UTF-8 text
    .jsonl    a JSON object a line: {"text": …}, or {"messages": […]} of a chat, which is written
              out as "role: content"; no template of the checkpoint runs
    .npy      token ids: an array of integers, which needs no tokenizer
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
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

TOKENS: Final = 65536
"""Tokens that calibrate, unless the user asks for another number."""

LENGTH: Final = 512
"""Tokens of a window; fewer for a model that takes fewer."""

SEED: Final = 0
"""Decides which windows of a text are read."""

_HELD_OUT: Final = 8  # for so many windows that calibrate there is one that judges

_FEWEST: Final = 4  # windows that calibrate

Ids = npt.NDArray[np.integer[Any]]

Windows = npt.NDArray[np.int64]
"""Token ids, [windows, length]."""


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


def cut_windows(
    texts: Sequence[Text], tokens: int, length: int, load_tokenizer: Callable[[], Any]
) -> tuple[Windows, Windows]:
    """Chooses windows of texts, as many of each: those that calibrate, and those that judge.

    `tokens` should calibrate. A window has `length` of them, with the marks that encoders expect
    around it. The model's tokenizer is loaded only if texts are not token ids already.
    """
    calibrating = max(tokens // length, 1)
    wanted = calibrating + max(calibrating // _HELD_OUT, 1)
    ends: tuple[int, ...] = ()
    found = [text.ids for text in texts if text.ids is not None]
    if not found:
        tokenizer = load_tokenizer()
        ends = _ends(tokenizer)
        needed = -(-wanted * length // len(texts))
        found = [_tokenized(text, needed, tokenizer) for text in texts]
    inner = length - len(ends)
    windows = _chosen(found, wanted, inner)
    judging = max(len(windows) // (_HELD_OUT + 1), 1)
    if len(windows) - judging < _FEWEST:
        names = ", ".join(text.path.name for text in texts)
        total = sum(ids.size for ids in found)
        least = (_FEWEST + 1) * inner
        raise PlanError(
            f"{names}: {total:,} tokens are too few to calibrate with: at least {least:,} are "
            f"needed, and {TOKENS:,} are usual"
        )
    if ends:
        windows = np.pad(windows, ((0, 0), (1, 1)), constant_values=((0, 0), ends))
    return windows[:-judging], windows[-judging:]


def _tokenized(text: Text, needed: int, tokenizer: Any) -> Ids:
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


def _chosen(texts: Sequence[Ids], wanted: int, length: int) -> Windows:
    """Returns windows of token ids in a shuffled order."""
    shuffled = random.Random(SEED)
    of_each = max((2 * wanted + len(texts)) // (2 * len(texts)), 1)
    chosen = []
    for ids in texts:
        count = ids.size // length
        order = list(range(count))
        shuffled.shuffle(order)
        cut = ids[: count * length].reshape(count, length)
        chosen.append(cut[order[:of_each]].astype(np.int64))
    windows = np.concatenate(chosen)
    order = list(range(len(windows)))
    shuffled.shuffle(order)
    return windows[order[:wanted]]


def _ends(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that encoders such as BERT expect around a text; none for other models."""
    first = getattr(tokenizer, "cls_token_id", None)
    last = getattr(tokenizer, "sep_token_id", None)
    return () if first is None or last is None else (first, last)
