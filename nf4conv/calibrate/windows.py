"""Cuts token ids into windows, and chooses those that calibrate and those that judge.

The choice is seeded: the same texts, tokens and seed give the same windows everywhere.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from nf4conv.calibrate.text import Ids, Text
from nf4conv.errors import PlanError

LENGTH: Final = 512
"""Tokens of a window; fewer for a model that takes fewer."""

HELD_OUT: Final = 8
"""For so many windows that calibrate there is one that judges."""

_FEWEST: Final = 4  # windows that calibrate


@dataclass(frozen=True)
class Windows:
    """Holds the windows that a model reads, those that judge behind those that calibrate.

    Attributes:
        ids: [windows, length] int64.
        calibrating: the number of windows that calibrate.
    """

    ids: Ids
    calibrating: int

    @property
    def tokens(self) -> int:
        """The number of tokens that calibrate."""
        return self.calibrating * int(self.ids.shape[1])

    @property
    def judging(self) -> int:
        """The number of windows that judge."""
        return len(self.ids) - self.calibrating


def tokens_needed(tokens: int, length: int) -> int:
    """Returns how many tokens both kinds of windows take."""
    calibrating = max(tokens // length, 1)
    return (calibrating + _judging(calibrating)) * length


def _judging(calibrating: int) -> int:
    return max(calibrating // HELD_OUT, 1)


def choose_windows(
    texts: Sequence[Text], tokens: int, length: int, seed: int, ends: tuple[int, ...] = ()
) -> Windows:
    """Chooses windows of texts.

    Args:
        texts: the texts that they are cut from, with the share of each.
        tokens: the number of tokens that should calibrate.
        length: the number of tokens of a window, `ends` included.
        seed: decides which windows are taken.
        ends: ids before and after the text of a window; empty for none.

    Raises:
        PlanError: the texts are too short.
    """
    wanted = tokens_needed(tokens, length) // length
    inner = length - len(ends)
    shuffled = random.Random(seed)
    chosen: list[Ids] = []
    for text in texts:
        count = text.ids.size // inner
        order = list(range(count))
        shuffled.shuffle(order)
        cut = text.ids[: count * inner].reshape(count, inner)
        chosen.append(cut[order[: max(round(wanted * text.share), 1)]])
    windows = np.concatenate(chosen)
    order = list(range(len(windows)))
    shuffled.shuffle(order)
    windows = windows[order[:wanted]]
    judging = max(len(windows) // (HELD_OUT + 1), 1)
    calibrating = len(windows) - judging
    if calibrating < _FEWEST:
        names = ", ".join(text.name for text in texts)
        found = sum(text.ids.size for text in texts)
        least = (_FEWEST + 1) * inner
        raise PlanError(
            f"{names}: {found:,} tokens are too few to calibrate with: at least {least:,} are "
            f"needed, and 65,536 are usual"
        )
    if ends:
        first = np.full((len(windows), 1), ends[0])
        last = np.full((len(windows), 1), ends[-1])
        windows = np.concatenate((first, windows, last), axis=1)
    return Windows(np.ascontiguousarray(windows), calibrating)
