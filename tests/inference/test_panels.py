"""Panels without a GPU: the PTX of their kernels, plans, and tensor maps of a driver or of none."""

import ctypes
import struct
import types
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from own_process import compiles, run_compiling

from nf4conv.codec.quant_state import Form
from nf4conv.inference.kernels.product import choosing
from nf4conv.inference.kernels.product.panels import plans
from nf4conv.inference.kernels.product.panels import prepare as preparing

CPU = torch.device("cpu")
MATRIX = choosing.Matrix(4096, 4096, Form("nf4", 64, True), 16)
MEASURED = (
    # rows of x, n, k, what is scaled, warpgroups, rows of x of a panel, cluster, splits, µs
    (33, 5120, 5120, "sums", 2, 48, 1, 3, 14.08),
    (48, 8192, 28672, "sums", 4, 48, 1, 4, 86.99),
    (64, 6144, 4096, "sums", 2, 64, 2, 1, 16.09),
    (64, 14336, 4096, "sums", 4, 64, 2, 1, 25.98),
    (96, 11008, 4096, "weights", 4, 96, 1, 3, 26.39),
    (128, 4096, 14336, "weights", 2, 128, 1, 4, 35.57),
    (256, 6144, 4096, "weights", 2, 256, 2, 1, 26.44),
    (512, 5120, 5120, "weights", 2, 176, 1, 1, 48.79),
    (512, 8192, 28672, "weights", 2, 256, 1, 1, 383.72),
)
"""On an H200: some of the plans that estimates were fitted to."""

MOST_SHARED = 232_448  # bytes that a program may have

SPILLED = """
import sys
sys.path.insert(0, "tests/helpers")
from panels_compiling import spilled
print(spilled(2))
"""


@compiles
@pytest.mark.slow
def test_no_register_is_spilled() -> None:
    done = run_compiling("-c", SPILLED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("panel", plans.PANELS, ids=lambda one: f"{one.rows}x{one.columns}")
def test_panels_fit_on_a_multiprocessor(panel: plans.Panel) -> None:
    assert panel.shared_bytes <= MOST_SHARED
    assert 128 * panel.groups * panel.registers <= 65_536
    plain = plans.without_nesting(panel)
    assert plain is plans.without_nesting(panel)
    assert not plain.nested


def test_a_panel_is_known_by_its_repr() -> None:
    """Triton's cache on disk tells kernels apart by it."""
    every = [one for panel in plans.PANELS for one in (panel, plans.without_nesting(panel))]
    assert len({repr(one) for one in every}) == len(every)


def test_every_program_has_a_turn() -> None:
    for m, k in product([1, 33, 100, 257, 512], [64, 128, 192, 1088, 28672]):
        for n in (1, 300, 4096, 28672):
            panel, cluster, splits = plans.choose_plan(m, n, k, 132)
            assert panel in plans.PANELS
            assert cluster in plans.CLUSTERS
            assert 1 <= cluster * splits <= -(-k // 128)


@pytest.mark.parametrize("measured", MEASURED, ids=lambda one: "-".join(map(str, one[:3])))
def test_estimates_are_near_what_was_measured(measured: tuple[Any, ...]) -> None:
    m, n, k, scaled, groups, columns, cluster, splits, time = measured
    panel = next(
        one
        for one in plans.PANELS
        if (one.scales_sums, one.groups, one.columns) == (scaled == "sums", groups, columns)
    )
    found = plans.estimate(plans.Plan(panel, cluster, splits), m, n, k, 132)
    assert abs(found / time - 1) < 1 / 8


def test_a_wave_of_fewer_multiprocessors() -> None:
    plan = plans.Plan(plans.PANELS[0], 2, 1)
    assert 0 < plans.estimate(plan, 64, 4096, 4096, 132) < plans.estimate(plan, 64, 4096, 4096, 4)


class Driver:
    """Makes tensor maps: the address, then what is described."""

    def __init__(self, status: int = 0, place: int = 0) -> None:
        self.status = status
        self.place = place
        self.asked: list[tuple[Any, ...]] = []

    def cuTensorMapEncodeTiled(self, target: Any, *described: Any) -> int:  # noqa: N802
        kind, rank, address, *arrays = described
        assert target.value % 64 == 0
        count = preparing.MAP_WORDS
        words = [7] * count
        words[self.place] = address.value
        ctypes.memmove(
            target, struct.pack(f"<{preparing.MAP_WORDS}Q", *words), 8 * preparing.MAP_WORDS
        )
        self.asked.append((kind.value, rank.value, *(list(one) for one in arrays[:3])))
        return self.status


def driver_is(monkeypatch: pytest.MonkeyPatch, found: Callable[[], Any]) -> None:
    monkeypatch.setattr(preparing, "cuda_driver", found)


def test_a_map_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver_is(monkeypatch, lambda: driver)
    assert preparing.map_of(40, 192, 48, torch.bfloat16) == (7,) * 15
    assert driver.asked[0] == (9, 3, [64, 40, 3], [384, 128], [64, 48, 2])


def no_driver() -> None:
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    "found",
    [lambda: Driver(status=1), lambda: Driver(place=3), lambda: object(), no_driver],
    ids=["refuses", "another layout", "old", "none"],
)
def test_without_tensor_maps_weights_are_decoded(
    monkeypatch: pytest.MonkeyPatch, found: Callable[[], Any]
) -> None:
    driver_is(monkeypatch, found)
    with pytest.raises(preparing.CannotLaunchError):
        preparing.map_of(40, 192, 48, torch.bfloat16)

    def prepare(x_shape: torch.Size, dtype: torch.dtype, *_: object) -> None:
        preparing.map_of(x_shape[0], x_shape[1], 48, dtype)

    monkeypatch.setattr(choosing, "prepare_panel", prepare)
    monkeypatch.setattr(choosing, "_prepare_decoded", lambda *given: given)
    monkeypatch.setattr(choosing, "_there", lambda multiply, _: multiply)
    monkeypatch.setattr(choosing, "is_faster", lambda *_: True)
    monkeypatch.setattr(choosing.launches, "is_hopper", lambda _: True)
    processors = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    asked = torch.Size((40, 4096)), torch.bfloat16, CPU, MATRIX
    found: Any = choosing.prepare_multiply.__wrapped__(*asked)
    assert found == (torch.bfloat16, CPU, MATRIX)
