"""Helps tests of hostile sources: its commands fail the test if they leave a traceback or take
long.

NF4CONV_DEBUG is set, so that no error which is not meant for the user can pass for one.
"""

from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner, Result
from four_bit import pack
from pace import time_limit

from nf4conv.cli import main

UP = "model.layers.0.mlp.up_proj.weight"
STATE = f"{UP}.quant_state.bitsandbytes__nf4"


@pytest.fixture(autouse=True)
def strict_and_in_no_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NF4CONV_DEBUG", "1")
    with time_limit(60):
        yield


def command(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    device = [] if words[0] == "inspect" else ["--device", "cpu"]
    return CliRunner().invoke(main, [*words, *device], catch_exceptions=False)


def refused(result: Result) -> str:
    """Returns the one line that a refusal consists of."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


def packed(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a 4-bit weight, some of them replaced, by suffix; "" are the codes."""
    tensors = pack(UP, torch.randn(64, 64).bfloat16())
    return tensors | {
        f"{UP}.{suffix}" if suffix else UP: tensor for suffix, tensor in changes.items()
    }
