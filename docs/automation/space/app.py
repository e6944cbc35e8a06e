"""Shows a page that turns a model on the Hub into 4 bits and opens a pull request with the result.

Usage: python app.py
"""

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

import nf4conv

if TYPE_CHECKING:
    import gradio

MOST_GIGABYTES: Final = float(os.environ.get("MOST_GIGABYTES", "20"))
"""Is the size of the largest original that the page accepts, in 10⁹ bytes."""

SECONDS_BETWEEN_LINES: Final = 1.0


class Progress:
    """Counts the bytes that are done. Threads of nf4conv call `advance`."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        """Adds to what is done."""
        with self._lock:
            self._done += count

    def line(self) -> str:
        """Returns what the page shows meanwhile."""
        share = min(self._done / max(self._total, 1), 1.0)
        return f"quantizing and verifying … {share:.0%}"


def convert(repository: str, target: str, token: str, scales: str) -> Iterator[str]:
    """Quantizes a model on the Hub, and opens a pull request with the result.

    Args:
        repository: the model, "org/name".
        target: the repository that gets the pull request. Empty for that of the model.
        token: the user's access token.
        scales: "search" or "absmax".

    Yields:
        Lines for the page. The last one says what became of the request.
    """
    repository = repository.strip()
    target = target.strip() or repository
    token = token.strip()
    if not repository or not token:
        yield "Please name a repository, and give a token that may open pull requests on it."
        return
    if Path(repository).exists():
        yield f"{repository}: please name a model on the Hub."
        return
    yield f"reading the headers of {repository} …"
    try:
        yield from _convert(repository, target, token, scales)
    except (nf4conv.Nf4convError, HfHubHTTPError, HFValidationError) as error:
        yield f"**Failed.** {error}"


def _convert(repository: str, target: str, token: str, scales: str) -> Iterator[str]:
    options = nf4conv.QuantizeOptions(scales=scales)
    where = nf4conv.SourceOptions(token=token, stream=True)
    is_public = not HfApi(token=token).model_info(target).private
    push = nf4conv.PushOptions(push_to_hub=target, public=is_public, create_pr=True, token=token)
    plan = nf4conv.plan_quantization(repository, options, where, push)
    totals = plan.totals()
    if totals.bytes_before > MOST_GIGABYTES * 1e9:
        size = totals.bytes_before / 1e9
        yield f"**Too large.** {repository} has {size:.1f} GB; this page takes {MOST_GIGABYTES:g}."
        return
    progress = Progress(2 * totals.bytes_before + totals.bytes_after)
    run = nf4conv.RunOptions(verify=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        out = Path(folder, "out")
        future = thread.submit(nf4conv.execute_quantization, plan, out, run, progress.advance, push)
        yield from _lines_until_done(future, progress)
        yield _done(future.result(), totals.bytes_before, totals.bytes_after)


def _lines_until_done(
    future: "Future[nf4conv.QuantizeReport]", progress: Progress
) -> Iterator[str]:
    """Yields a line each second until the work is done or has failed."""
    finished = threading.Event()
    future.add_done_callback(lambda _: finished.set())
    while not finished.wait(SECONDS_BETWEEN_LINES):
        yield progress.line()


def _done(report: nf4conv.QuantizeReport, before: int, after: int) -> str:
    """Returns the last line: what was made, and where it is."""
    sizes = f"{before / 1e6:,.1f} MB → {after / 1e6:,.1f} MB"
    return f"**Done.** {sizes}, every value checked: [pull request]({report.pushed})"


def page() -> "gradio.Blocks":
    """Returns the page."""
    import gradio  # `convert` works without it

    with gradio.Blocks(title="4-bit my repo") as blocks:
        gradio.Markdown(
            "# 4-bit my repo\nnf4conv quantizes a model to NF4, checks every value, and opens a "
            "pull request with the result. transformers and PEFT load it as it is."
        )
        repository = gradio.Textbox(label="Repository", placeholder="me/my-fine-tune")
        target = gradio.Textbox(label="Pull request on", placeholder="the same repository")
        token = gradio.Textbox(label="Token that may write", type="password")
        scales = gradio.Radio(["search", "absmax"], value="search", label="Scales")
        button = gradio.Button("Quantize", variant="primary")
        said = gradio.Markdown()
        button.click(convert, [repository, target, token, scales], said, api_name="convert")
    return blocks


if __name__ == "__main__":
    page().queue(default_concurrency_limit=1).launch()
