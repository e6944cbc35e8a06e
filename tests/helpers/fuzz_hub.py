"""Lets commands ask a hostile Hub: silent, slow, cut off, busy, lying, or somewhere else.

The Hub runs in this process, on a loopback port. So this module imports it late: only after the
fork may threads be started.
"""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import contents
from fuzz_case import Case, passes_verify
from fuzz_templates import PART_OPTIONS
from huggingface_hub import constants
from mutations import mutate_bytes, mutate_checkpoint, mutate_json

import nf4conv.sources.remote.asking as asking
from nf4conv.sources.unfinished import is_model

if TYPE_CHECKING:
    from hub_server import Answer, Fault, Hub

REPO = "org/name"
ADAPTER = "org/adapter"
PUSHED = "me/made"
TOKEN = "hf_secret"
SECONDS = 0.2  # that a request may be silent

PATHS = (
    ".", "GET /api", "GET /api/models", "GET /cdn", "HEAD", "/resolve/", "config.json", "index",
    "safetensors", "POST /api", "preupload", "/commit/", "batch", "PUT /upload", "create",
)  # fmt: skip
STATUSES = (
    200, 204, 206, 301, 302, 304, 307, 400, 401, 403, 404, 408, 409, 413, 416, 418, 429, 500, 503,
)  # fmt: skip
HEADERS = (
    "ETag", "X-Linked-Etag", "X-Linked-Size", "X-Repo-Commit", "Content-Range", "Location",
    "Accept-Ranges", "Content-Type", "Retry-After", "X-Error-Code", "Content-Encoding", "Link",
)  # fmt: skip
VALUES = (
    "", "0", "-1", "x", "99999999999999999999", '"../../x"', "../../beside/thesis", "/etc/passwd",
    "bytes 0-0/1", "bytes */0", "http://127.0.0.1:9/x", "//localhost:9/", "file:///etc/passwd",
    "application/json", "gzip", "é", "RepoNotFound", "GatedRepo", "EntryNotFound", "a" * 5000,
)  # fmt: skip
BODIES = (
    b"", b"<html>Sign in to the hotel's wireless network</html>", b"null", b"[]", b"5", b'"x"',
    b"[" * 5000, b"\xff\xfe", b"{}", b'{"siblings": [{}], "sha": 5}', bytes(100_000),
)  # fmt: skip


def start_hub(folder: Path) -> "Hub":
    """Returns the Hub of this process; starts it the first time."""
    from hub_server import HUB

    if HUB.url != constants.ENDPOINT:
        constants.ENDPOINT = HUB.url
        constants.HUGGINGFACE_CO_URL_TEMPLATE = HUB.url + "/{repo_id}/resolve/{revision}/{filename}"
        constants.HF_HUB_DOWNLOAD_TIMEOUT = SECONDS
        constants.HF_HUB_ETAG_TIMEOUT = SECONDS
        asking.WAITS = (0.0, 0.0, 0.0)  # type: ignore[misc]
        time.sleep = lambda _: None
        os.environ["XDG_CACHE_HOME"] = str(folder / "user")
        assert constants.HF_HUB_DISABLE_XET
    HUB.clear()
    return HUB


def hub_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    """Publishes a model and an adapter, and runs a command that fetches them or pushes."""
    from hub_server import Repo

    hub = start_hub(work.parent)
    out = work / "out"
    base = work / "base"
    shutil.copytree(whole / "base", base)
    if chosen.random() < 0.2:
        mutate_checkpoint(chosen, base)
    if not any(path.stat().st_size > 2**24 for path in base.rglob("*") if path.is_file()):
        for name, folder in ((REPO, base), (ADAPTER, whole / "adapter")):
            hub.repos[name] = Repo()
            hub.repos[name].commit(contents(folder))
    hub.faults = [a_fault(chosen) for _ in range(chosen.choice((1, 1, 2)))]
    cache = ("--cache-dir", work / "cache")
    quantize = ["quantize", REPO, out, *PART_OPTIONS, *cache]
    push = ["quantize", whole / "base", out, *PART_OPTIONS]
    push += ["--push-to-hub", PUSHED, "--token", TOKEN]
    commands: list[list[object]] = [
        ["inspect", REPO, *cache],
        quantize,
        [*quantize, "--stream"],
        [*quantize, "--stream", "--part", "1/2"],
        ["quantize", whole / "base", out, "--lora", ADAPTER, *cache],
        push,
        push,
    ]
    words = chosen.choice(commands)
    if "--push-to-hub" in words:
        return Case(words, out, partial(is_pushed_whole, hub, out), may_be_whole=True)
    return Case(words, out, partial(has_right_weights, words, out, base))


def a_fault(chosen: random.Random) -> "Fault":
    """Returns something that goes wrong at some requests."""
    from hub_server import Fault

    path = chosen.choice(PATHS)
    times = chosen.choice((1, 1, 2, 99))
    value = chosen.choice(VALUES)
    header = {chosen.choice(HEADERS): value}
    changes: list[Callable[[Answer], Answer]] = [
        lambda answer: (answer[0], chosen.choice(BODIES), answer[2]),
        lambda answer: (answer[0], mutate_json(chosen, answer[1]), answer[2]),
        lambda answer: (answer[0], mutate_json(chosen, answer[1]), answer[2]),
        lambda answer: (answer[0], mutate_bytes(chosen, answer[1] + b"\0"), answer[2]),
        lambda answer: (answer[0], answer[1], answer[2] | header),
        lambda answer: (chosen.choice(STATUSES), answer[1], answer[2] | header),
        lambda answer: (answer[0], answer[1], {}),
        lambda answer: (answer[0], answer[1], answer[2] | {"Content-Length": value or "7"}),
    ]
    silence = threading.Event()
    kinds = [
        Fault(path, times, status=chosen.choice(STATUSES), headers=header),
        Fault(path, times, cut=chosen.choice((0, 1, 10, 1000))),
        Fault(path, times, corrupt=True),
        Fault(path, min(times, 2), call=lambda: silence.wait(2 * SECONDS) and None),
        *(Fault(path, times, change=change) for change in changes),
    ]
    return chosen.choice(kinds)


def has_right_weights(words: list[object], out: Path, base: Path, finished: Any) -> str | None:
    """Returns what is wrong with a result of which the Hub has lied."""
    found = passes_verify(words, out, finished)
    if found or finished.exit_code or not is_model(out) or "--lora" in words:
        return found
    from fuzz_templates import run

    checked = run("verify", out, "--source", base)
    return f"verify --source: {checked.stdout}" if checked.exit_code else None


def is_pushed_whole(hub: "Hub", out: Path, finished: Any) -> str | None:
    """Returns what is wrong with what was pushed: it is all of the result, or nothing."""
    found = hub.repos.get(PUSHED)
    pushed = {} if found is None else dict(found.files)
    pushed.pop(".gitattributes", None)
    if pushed and pushed != contents(out):
        return f"{sorted(pushed)} were pushed, and are not the result"
    if not pushed and finished.exit_code == 0:
        return "nothing was pushed, and exit code 0"
    return None
