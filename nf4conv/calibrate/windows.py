"""Cuts texts into windows of tokens, and chooses those that calibrate and those that judge.

The same texts and tokens give the same windows everywhere.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nf4conv.calibrate.text import Ids, Text, tokenized
from nf4conv.errors import PlanError

TOKENS: Final = 65536
"""Tokens that calibrate, unless the user asks for another number."""

LENGTH: Final = 512
"""Tokens of a window; fewer for a model that takes fewer."""

SEED: Final = 0
"""Decides which windows of a text are read."""

_HELD_OUT: Final = 8  # for so many windows that calibrate there is one that judges

_FEWEST: Final = 4  # windows that calibrate

Windows = npt.NDArray[np.int64]
"""Token ids, [windows, length]."""


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
        found = [tokenized(text, needed, tokenizer) for text in texts]
    inner = length - len(ends)
    windows = _chosen(found, wanted, inner)
    judging = max(len(windows) // (_HELD_OUT + 1), 1)
    if len(windows) - judging < _FEWEST:
        names = ", ".join(text.name for text in texts)
        total = sum(ids.size for ids in found)
        least = (_FEWEST + 1) * inner
        raise PlanError(
            f"{names}: {total:,} tokens are too few to calibrate with: at least {least:,} are "
            f"needed, and {TOKENS:,} are usual"
        )
    if ends:
        first = np.full((len(windows), 1), ends[0])
        last = np.full((len(windows), 1), ends[1])
        windows = np.concatenate((first, windows, last), axis=1)
    return windows[:-judging], windows[-judging:]


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
