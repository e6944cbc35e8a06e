"""Makes one part of a checkpoint, in a worker: what travels to it, and what comes back."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from nf4conv import errors
from nf4conv.options import RunOptions
from nf4conv.plan.parts import plan_part
from nf4conv.report.results import DequantizeReport, QuantizeReport

Made: TypeAlias = QuantizeReport | DequantizeReport | Exception
"""The report of a part, or the error that ended it."""


@dataclass(frozen=True)
class PartWork:
    """Tells a worker what to do. All of it can be pickled."""

    # folder that the driver works in, from which the user's relative paths start
    folder: Path
    # plans the command anew: function and arguments
    again: "Callable[..., Any]"
    request: tuple[Any, ...]
    # carries out the plan
    execute: Callable[..., QuantizeReport | DequantizeReport]
    # output folder
    out: Path
    # how to run, and which part to make
    run: RunOptions


class Crew(Protocol):
    """Workers that make parts."""

    @property
    def parts(self) -> int:
        """Number of parts that keeps all workers busy."""

    @property
    def run(self) -> RunOptions:
        """The options that each part is run with."""

    def submit(self, work: PartWork) -> "Future[Made]":
        """Has a worker make a part."""


@lru_cache(maxsize=1)  # a process of Ray's gets several parts
def _planned(again: "Callable[..., Any]", request: tuple[Any, ...]) -> Any:
    return again(*request)


def make_part(work: PartWork) -> Made:
    """Makes a part.

    Returns:
        Its report; or an error of a kind that can travel, which Ray then does not try again.
    """
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the driver has a bar of its own
    with suppress(OSError):  # on another host the folder need not be there
        os.chdir(work.folder)
    try:
        plan = plan_part(_planned(work.again, work.request), work.run)
        part = replace(plan.part, is_watched=True)
        return work.execute(replace(plan, part=part), work.out, replace(work.run, part=None))
    except Exception as error:  # noqa: BLE001 - the driver raises it again
        return _travelling(error)


def _travelling(error: Exception) -> Exception:
    """Returns an error as one that another process can read: of our kinds, or of Python's."""
    if type(error).__module__ == errors.__name__:
        return error
    for kind in type(error).__mro__:
        if kind.__module__ in (errors.__name__, "builtins"):
            break
    travelling: Exception = kind(str(error))
    return travelling
