"""Asks the Hub, by one rule: how long a request may be silent, and how often it is made again.

A request ends with an error after HF_HUB_DOWNLOAD_TIMEOUT seconds (10 by default) without a byte.
It is made again up to four times, after 1, 2, 4 and 8 seconds, if the server was busy, was silent,
or broke off; and once, after 1 second, if no connection came about. huggingface_hub has retries of
its own, which differ between releases, and of which its older ones have none for a first request.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar, cast

from huggingface_hub import constants, errors

from nf4conv.errors import Nf4convError, SourceError

T = TypeVar("T")

_HTTP_ERROR: Final = cast("type[Exception]", errors.HfHubHTTPError.__bases__[0])
"""The base of the errors of the HTTP library that huggingface_hub happens to be built on."""

HUB_ERRORS: Final[tuple[type[Exception], ...]] = (
    OSError,
    errors.EntryNotFoundError,
    errors.HFValidationError,
    _HTTP_ERROR,
)
"""huggingface_hub's own errors, and those of its HTTP library."""

WAITS: Final = (1.0, 2.0, 4.0, 8.0)
"""Seconds between tries, after those of huggingface_hub itself."""

_LOGIN: Final = "log in with `hf auth login`, or set HF_TOKEN"

_LONGEST_LINE: Final = 1000  # characters of what a server says
_PASSING_STATUSES: Final = (408, 425, 429, 500, 502, 503, 504)
_NO_CONNECTION: Final = ("ConnectError", "ConnectTimeout", "NewConnectionError", "ProxyError")
"""Names of the errors of HTTP libraries that say that nobody was reached."""


def timeout() -> float:
    """Returns the seconds that a request may be silent."""
    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def patiently(attempt: Callable[[], T], pause: Callable[[float], object] | None = None) -> T:
    """Makes an attempt, and repeats it as long as that may help; then it raises one of HUB_ERRORS.

    `pause` waits for so many seconds, and raises what is to end the waiting.
    """
    for wait in WAITS:
        try:
            return attempt()
        except HUB_ERRORS as error:
            if not _may_pass(error) or (wait > WAITS[0] and is_unreachable(error)):
                raise
        (pause or time.sleep)(wait)
    return attempt()


def _may_pass(error: Exception) -> bool:
    """Returns True if trying again may help."""
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status in _PASSING_STATUSES
    is_of_the_disk = isinstance(error, OSError) and error.errno is not None
    return not is_of_the_disk or is_unreachable(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and what it came of."""
    while error is not None:
        yield error
        error = error.__cause__


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub into a SourceError: one line, with what the Hub says of
    `what`, "org/name" or a file of it.

    An answer that is not what huggingface_hub expects makes it raise anything.
    """
    try:
        yield
    except Nf4convError:
        raise
    except Exception as error:
        raise SourceError(f"{what}: {one_line(error)}{_next_step(error, what)}") from error


def _next_step(error: Exception, what: str) -> str:
    """Returns what to do about an error, to be put behind it; empty if that is not known."""
    if is_unreachable(error):
        return (
            "; you seem offline; what was downloaded before is read with --local-files-only, or "
            "HF_HUB_OFFLINE=1"
        )
    if isinstance(error, errors.GatedRepoError):
        repo = "/".join(what.split("/")[:2])
        page = f"{constants.ENDPOINT}/{repo}"
        return f"; accept the conditions at {page}, and {_LOGIN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"; if the name is right, {_LOGIN}"
    return ""


def is_unreachable(error: Exception) -> bool:
    """Returns True for an error that says that no server was reached at all."""
    for cause in _causes(error):
        if isinstance(cause, ConnectionRefusedError) or type(cause).__name__ in _NO_CONNECTION:
            return True
    # requests says it in words only
    return any(word in str(error) for word in ("NewConnectionError", "NameResolutionError"))


def one_line(error: Exception) -> str:
    """Returns what an error says on one line, without the number of the request."""
    text = re.sub(r"\(Request ID: [^)]*\)", "", str(error))
    return " ".join(text.split())[:_LONGEST_LINE] or type(error).__name__
