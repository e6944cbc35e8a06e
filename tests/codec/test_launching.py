"""How kernels are launched through Triton's internals, and what happens where a Triton lacks them.

What is compiled is played here: only a GPU loads machine code.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from own_process import CANNOT_COMPILE, NEEDS_COMPILER

if CANNOT_COMPILE:  # the module below imports Triton's compiler
    pytest.skip(NEEDS_COMPILER, allow_module_level=True)

from nf4conv.codec.kernels import internals


class Metadata(NamedTuple):
    """Of a compiled kernel."""

    target: str = "sm_90"
    num_ctas: int = 1
    shared: int = 0


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that packs nothing."""
    played = SimpleNamespace(pack_metadata=lambda metadata: metadata)
    monkeypatch.setattr(internals, "make_backend", lambda _: played)


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_launches_by_addresses(version: str, cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals.triton, "__version__", version)
    calls: list[tuple[Any, ...]] = []

    class Run:
        """What Triton makes of a kernel; `launch` is its part in C."""

        launch_cooperative_grid = False
        global_scratch_size = 0
        profile_scratch_size = 0

        def __call__(self, *arguments: Any) -> None:
            calls.append(arguments)

        def launch(self, *arguments: Any) -> None:
            calls.append(("in C", *arguments))

    compiled = SimpleNamespace(run=Run(), function=77, metadata=Metadata())
    internals.enlarge(compiled, 4096)
    launch = internals.prepare_launch(compiled, (64, True), cluster, True)
    assert launch is not None
    launch(9, 5, 1000, 2000, 3)
    metadata = Metadata(num_ctas=cluster, shared=4096)
    behind = (metadata, None, None, None, 1000, 2000, 3, 64, True)
    if version == "3.6.0":
        assert calls == [("in C", 9, 1, 1, 5, 77, False, True, None, None, *behind)]
    else:
        assert calls == [(9, 1, 1, 5, 77, *behind)]


def test_a_triton_without_these_internals_launches_in_its_own_way() -> None:
    compiled = SimpleNamespace(run=None, function=77, metadata=SimpleNamespace(target="sm_90"))
    with pytest.raises(internals.CannotLaunchError):
        internals.enlarge(compiled, 4096)
    assert internals.prepare_launch(compiled, (64,), 2, True) is None
    del compiled.function
    assert internals.prepare_launch(compiled, (64,), 1, True) is None
    calls = []

    class Kernel:
        """What `triton.jit` returns."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: calls.append((grid, arguments, options))

    kinds = (torch.uint8, torch.float32, 7)
    launch = internals.launch_as_triton_does(Kernel(), kinds, (64,), {"num_warps": 4})
    launch(9, 5, 1000, 2000, 3)
    ((grid, (codes, scales, *rest), options),) = calls
    assert (grid, rest, options) == ((9,), [3, 64], {"num_warps": 4})
    assert (codes.data_ptr(), codes.dtype) == (1000, torch.uint8)
    assert (scales.data_ptr(), scales.dtype) == (2000, torch.float32)


def test_records_keep_their_names_and_tell_triton_types_alone() -> None:
    """Triton would compile in that a number in a record is 1, or a multiple of 16."""

    class Weight(NamedTuple):
        codes: Any
        rows: int

    kinds = (torch.float32, Weight(torch.uint8, 16), (1 << 40,), 0.5, 7)
    examples = [internals.example_of(one) for one in kinds]
    assert examples[0] is torch.float32
    assert examples[3:] == [0.5, 7]
    codes, rows = examples[1]
    assert isinstance(examples[1], Weight)
    assert (codes.dtype, codes.data_ptr() % 2, rows) == (torch.uint8, 1, 3)
    assert examples[2][0] > 1 << 31
    assert examples[2][0] % 16
    calls: list[Any] = []

    class Kernel:
        """What `triton.jit` returns."""

        def __getitem__(self, _: tuple[int, ...]) -> Any:
            return lambda *arguments, **_: calls.append(arguments)

    launch = internals.launch_as_triton_does(Kernel(), kinds, (), {})
    launch(9, 5, 1000, (2000, 32), (4,), 0.25, 1)
    ((scales, weight, *rest),) = calls
    assert (scales.data_ptr(), weight.codes.data_ptr(), weight.rows) == (1000, 2000, 32)
    assert rest == [(4,), 0.25, 1]
