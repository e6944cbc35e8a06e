"""A pytest plugin for several processes that share the tests of a GPU.

    CLAIMS=FOLDER python -m pytest -p claiming FILE...

Every process collects the same tests, cuts them into the same groups, and runs the groups that it
is the first to claim, by a file in the folder. It writes a line of JSON when a test begins, and one
when it has ended, so whoever reads them knows what a process that died was doing. FOLDER/asked
holds names of tests, one a line, if only these are to run.
"""

import gc
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol

WHOLE = (
    "test_decode_kernels", "test_experts_encoded", "test_ggml_kernels", "test_golden",
    "test_kernels", "test_ops", "test_quick", "test_reciprocal", "test_rounding_kernels",
    "test_search", "test_two_engines",
)  # fmt: skip
"""Files that compute on a GPU wherever there is one: all of their tests run, marked or not."""

GROUPS = (
    ("test_linear_compiled_gpu", 1), ("test_experts_gpu.py::test_layers", 1),
    ("test_moe_sharding", 1), ("test_experts_gpu.py::test_a_model", 1), ("test_bare_cuda", 3),
    ("test_lora", 1), ("test_spread", 1), ("test_compare", 1), ("test_panels_gpu", 2),
    ("test_linear_gpu", 4), ("test_ggml_kernels", 4), ("test_two_engines", 6), ("test_gpu", 6),
)  # fmt: skip
"""What takes longest, or is most in need of a proof, in this order; and tests in a group."""

OTHERS = 12  # tests in a group

BROKEN = re.compile(
    r"CUDA error|CUDA_ERROR_(?!OUT_OF_MEMORY)|AcceleratorError|device-side assert|illegal memory"
    r"|misaligned address|unspecified launch failure|illegal instruction"
)
"""What a failure says after which nothing runs any more on the GPU in this process."""


def folder() -> Path:
    return Path(os.environ["CLAIMS"])


def is_wanted(item: pytest.Item) -> bool:
    if item.get_closest_marker("browser") or item.get_closest_marker("architectures"):
        return False
    return bool(item.get_closest_marker("gpu")) or item.path.stem in WHOLE


def place(item: pytest.Item) -> int:
    """Returns the number of the line of GROUPS that a test belongs to."""
    for number, (start, _) in enumerate(GROUPS):
        if Path(item.nodeid.split("::")[0]).name.startswith(start) or f"/{start}" in item.nodeid:
            return number
    return len(GROUPS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = folder() / "asked"
    names = set(asked.read_text().splitlines()) if asked.exists() else None
    wanted = []
    others = []
    for item in items:
        is_asked = item.nodeid in names if names is not None else is_wanted(item)
        (wanted if is_asked else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = sorted(wanted, key=place)


def grouped(items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
    """Yields groups of tests that follow each other in one file."""
    group: list[pytest.Item] = []
    for item in items:
        number = place(item)
        most = GROUPS[number][1] if number < len(GROUPS) else OTHERS
        if group and (len(group) >= most or group[-1].path != item.path):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def is_first(name: str) -> bool:
    """Claims a group; returns whether no process had."""
    try:
        os.close(os.open(folder() / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def begun() -> set[str]:
    """Returns the tests that were begun, by processes that died among others."""
    lines = []
    for file in folder().glob("results-*"):
        lines += file.read_text().splitlines()
    return {json.loads(line).get("begun") for line in lines}


_uncollected: dict[str, str] = {}  # files, or parts of them, and why


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _uncollected[report.nodeid] = report.longreprtext[-3000:]


class Results:
    """Writes down what happens in this process."""

    def __init__(self) -> None:
        self.file = (folder() / f"results-{os.getpid()}").open("a", buffering=1)

    def write(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    if session.config.option.collectonly:
        return True
    # hub_server.py gives each process an empty one, where each would compile the same kernels
    os.environ["XDG_CACHE_HOME"] = str(folder() / "cache")
    results = Results()
    results.write(collected=[item.nodeid for item in session.items])
    for name, told in _uncollected.items():
        results.write(ended=name, outcome="failed", seconds=0.0, told=told)
    for group in grouped(session.items):
        claim = f"claim-{session.items.index(group[0])}"
        if not is_first(claim):
            continue
        known = begun()
        left = [item for item in group if item.nodeid not in known]
        for item, following in zip(left, [*left[1:], None], strict=True):
            results.write(begun=item.nodeid, claim=claim, at=time.time())
            told = run(item, following, results)
            if BROKEN.search(told):
                sys.stdout.flush()
                os._exit(70)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # other processes need it
    results.write(done=True)
    return True


def run(item: pytest.Item, following: pytest.Item | None, results: Results) -> str:
    """Runs a test and returns what its failure says."""
    start = time.time()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=True, nextitem=following)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    outcome = "passed"
    told = ""
    for report in reports:
        if report.skipped:
            outcome = "skipped"
            told = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
        if report.failed:
            outcome = "failed"
            told += report.longreprtext
    seconds = round(time.time() - start, 2)
    results.write(ended=item.nodeid, outcome=outcome, seconds=seconds, told=told[-3000:])
    return told
