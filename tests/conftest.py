"""Settles what other modules need before they are imported: the Hub of the tests, and the
interpreter that runs kernels without a GPU.
"""

import inspect
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partialmethod
from pathlib import Path

# the Hub of all tests; sets HF_ENDPOINT, which huggingface_hub reads when it is imported
import hub_server
import pytest
import torch
from checkpoints import write_source
from click.testing import CliRunner

from nf4conv.codec.backends import why_plain

if "KERNEL_CACHE" in os.environ:  # processes of `make gpu` compile each kernel once between them
    os.environ["XDG_CACHE_HOME"] = os.environ["KERNEL_CACHE"]

if why_plain((9, 0)):
    collect_ignore_glob = [
        "*/test_compile.py",
        "*/test_decode_kernels.py",
        "*/test_experts_kernels.py",
        "*/test_ggml_kernels.py",
        "*/test_gpu.py",
        "*/test_kernels.py",
        "*/test_panels.py",
        "*/test_rounding_kernels.py",
    ]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# click before 8.2 mixes stderr into stdout
if "mix_stderr" in inspect.signature(CliRunner).parameters:
    CliRunner.__init__ = partialmethod(CliRunner.__init__, mix_stderr=False)  # type: ignore[assignment]


# what measures time, memory or signals runs in one process, one after the other
TIMED = {
    "test_interrupts", "test_limits", "test_memory", "test_plan_speed", "test_progress",
    "test_slow_reads", "test_resume", "test_hub_faults",
}  # fmt: skip

# what computes on a GPU where there is one: `make gpu` runs it besides what is marked gpu
ON_ANY_DEVICE = {
    "test_decode_kernels", "test_experts_encoded", "test_ggml_kernels", "test_golden",
    "test_kernels", "test_ops", "test_quick", "test_reciprocal", "test_rounding_kernels",
    "test_search", "test_two_engines",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of a file together when pytest-xdist divides them over processes."""
    for item in items:
        if item.path.stem in ON_ANY_DEVICE:
            item.add_marker(pytest.mark.device)
        group = "timed" if item.path.stem in TIMED else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True, scope="module")
def _memory_for_others() -> Iterator[None]:
    """Leaves a GPU's memory to the processes that share it."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of two shards."""
    return write_source(tmp_path / "source")


@pytest.fixture
def hub() -> Iterator[hub_server.Hub]:
    """The Hub, empty."""
    hub_server.HUB.clear()
    yield hub_server.HUB
    hub_server.HUB.clear()


# The same examples each time, and no limit of time, so that no test fails by chance.
# `--hypothesis-profile default` tries others.
with suppress(ImportError):  # an environment for a few tests may lack it
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "settled",
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("settled")

# as of what a script runs by `&`; tests of Ctrl-C need it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
