"""Asks the Hub, by one rule: how long a request may be silent, and how often it is made again.

A request ends with an error after HF_HUB_DOWNLOAD_TIMEOUT seconds (10 by default) without a byte.
It is made again up to four times, after 1, 2, 4 and 8 seconds, if the server was busy, was silent,
or broke off; and once, after 1 second, if no connection came about. A server that says when to come
back (Retry-After) is believed, up to a minute.

huggingface_hub has retries of its own for downloads; its http_backoff neither streams a response
nor checks its size, so ranges are asked for here.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import huggingface_hub.utils
from huggingface_hub import constants, errors

from nf4conv.errors import Nf4convError, SourceError

T = TypeVar("T")

# its functions are exported by name only, and differ between releases
_utils: Any = huggingface_hub.utils

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
_LONGEST_WAIT: Final = 60.0  # seconds, whatever a server says
_PASSING_STATUSES: Final = (408, 425, 429, 500, 502, 503, 504)


def timeout() -> float:
    """Returns the seconds that a request may be silent."""
    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def patiently(attempt: Callable[[], T], pause: Callable[[float], object] | None = None) -> T:
    """Makes an attempt, and repeats it as long as that may help; then it raises one of HUB_ERRORS.

    `pause` waits for so many seconds, and raises what is to end the waiting.
    """
    tries = 0
    while True:
        try:
            return attempt()
        except HUB_ERRORS as error:
            waits = _waits_after(error)
            if tries >= len(waits):
                raise
            wait = _asked_wait(error) or waits[tries]
        tries += 1
        (pause or time.sleep)(wait)


def _waits_after(error: Exception) -> tuple[float, ...]:
    """Returns the seconds to wait before each further try; none if trying again does not help."""
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return WAITS if status in _PASSING_STATUSES else ()
        if _is_without_connection(cause):
            return WAITS[:1]
    is_of_the_disk = isinstance(error, OSError) and error.errno is not None
    return () if is_of_the_disk else WAITS


def _is_without_connection(error: BaseException) -> bool:
    """Returns True for the errors of HTTP libraries that say that nobody was reached."""
    name = type(error).__name__
    return name in ("ConnectError", "ConnectTimeout", "NewConnectionError", "ProxyError")


def _asked_wait(error: Exception) -> float | None:
    """Returns the seconds that the server wants to be left alone; None if it does not say."""
    for cause in _causes(error):
        headers = getattr(getattr(cause, "response", None), "headers", None) or {}
        text = str(headers.get("Retry-After", ""))
        if text.isascii() and text.isdecimal():
            return min(float(text), _LONGEST_WAIT)
    return None


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
        if _is_without_connection(cause) or isinstance(cause, ConnectionRefusedError):
            return True
    # requests says it in words only
    return any(word in str(error) for word in ("NewConnectionError", "NameResolutionError"))


def one_line(error: Exception) -> str:
    """Returns what an error says on one line, without the number of the request.

    An error that is none of HUB_ERRORS comes of an answer that nobody expected, or of a system
    that starts no more threads.
    """
    text = re.sub(r"\(Request ID: [^)]*\)", "", str(error))
    line = " ".join(text.split())[:_LONGEST_LINE] or type(error).__name__
    if isinstance(error, (*HUB_ERRORS, RuntimeError, MemoryError)):
        return line
    return f"the hub's answer makes no sense ({type(error).__name__}: {line})"


def get_range(url: str, headers: Mapping[str, str], start: int, stop: int) -> bytes | None:
    """Asks once for bytes start … stop of a file; returns None if the server gives no parts of
    files, and raises one of HUB_ERRORS if it refuses, is silent, or gives too few.

    huggingface_hub is built on requests before 1.0, and on httpx or its successor from then on.
    """
    session: Any = _utils.get_session()
    headers = {**headers, "Range": f"bytes={start}-{stop - 1}"}
    if callable(session.stream):  # of requests it is a flag
        request = session.stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=timeout()
        )
        with request as response:
            return _body(response, response.iter_bytes, stop - start)
    with session.get(url, headers=headers, stream=True, timeout=timeout()) as response:
        return _body(response, lambda: response.iter_content(2**16), stop - start)


def _body(response: Any, chunks: Callable[[], Iterable[bytes]], size: int) -> bytes | None:
    """Reads so many bytes of a response; None if it is not a part of a file."""
    _utils.hf_raise_for_status(response)
    if response.status_code != 206:
        return None
    content = bytearray()
    for chunk in chunks():
        content += chunk
        if len(content) > size:
            break
    if len(content) != size:
        raise OSError(f"got {len(content):,} of {size:,} bytes")
    return bytes(content)
