"""Files made to break who reads them: refused by name or read safely, in little time, never with a
traceback.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from four_bit import pack
from four_bit import write as write_packed
from hostile import STATE, UP, command, packed, refused, strict_and_in_no_time  # noqa: F401
from safetensors.torch import load_file, save_file

import nf4conv.commands.planning as planning


def with_state(**fields: Any) -> dict[str, torch.Tensor]:
    tensors = packed()
    state = json.loads(bytes(tensors[STATE].tolist())) | fields
    return tensors | {STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


EIGHT_BIT = {
    UP: torch.ones(64, 64, dtype=torch.int8),
    f"{UP.removesuffix('weight')}SCB": torch.ones(64),
}
FP8 = {UP: torch.ones(64, 64).to(torch.float8_e4m3fn), f"{UP}_scale_inv": torch.ones(1, 1)}

# --- tracebacks of a campaign, each a kind --------------------------------------------------------

WEIGHTS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "a huge offset": (with_state(nested_offset=2**200), "is no float32"),
    "an offset without digits": (with_state(nested_offset="1"), "is no float32"),
    "a huge shape": (with_state(shape=[0, 2**200]), "is not a shape"),
    "many dimensions": (with_state(shape=[1] * 65), "is not a shape"),
    "a quant state of floats": (packed() | {STATE: packed()[STATE].float()}, "are no quant state"),
    "absmax of rank 2": (packed(absmax=packed()[f"{UP}.absmax"].view(-1, 1)), "expected U8 [64]"),
    "absmax of rank 0": (
        pack(UP, torch.randn(8, 8).bfloat16(), double_quant=False)
        | {f"{UP}.absmax": torch.tensor(1.0)},
        "expected F32 [1]",
    ),
    "nested absmax of rank 2": (packed(nested_absmax=torch.ones(1, 1)), "expected F32 [1]"),
    "codes of complex numbers": (
        packed() | {UP: packed()[UP].view(-1).view(torch.complex64)},
        "part of a weight that is already quantized",
    ),
    "a code map of millions": (packed(quant_map=torch.ones(4096, 64)), "expected F32 [16]"),
    "a nested map alone": (
        pack(UP, torch.randn(8, 8).bfloat16(), double_quant=False)
        | {f"{UP}.nested_quant_map": torch.ones(256)},
        "nested_absmax is missing",
    ),
    "no nested map": (
        {name: part for name, part in packed().items() if not name.endswith("nested_quant_map")},
        "nested_quant_map is missing",
    ),
    "two quant states": (
        packed() | {STATE.replace("nf4", "fp4"): packed()[STATE]},
        "has 2 quant states",
    ),
    "SCB of complex numbers": (
        EIGHT_BIT | {f"{UP.removesuffix('weight')}SCB": torch.ones(64, dtype=torch.complex64)},
        "does not go with",
    ),
    "SCB of rank 0": (
        {
            UP: torch.ones(1, 64, dtype=torch.int8),
            f"{UP.removesuffix('weight')}SCB": torch.tensor(1.0),
        },
        "does not go with",
    ),
    "a complex scale": (
        FP8 | {f"{UP}_scale_inv": torch.ones(1, 1, dtype=torch.complex64)},
        "does not go with",
    ),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name", ["quantize", "dequantize", "verify", "inspect"])
def test_weights_that_do_not_hold_together(tmp_path: Path, kind: str, name: str):
    tensors, reason = WEIGHTS[kind]
    source = write_packed(tmp_path / "source", tensors)
    places = {"verify": [source], "inspect": [source]}
    done = command(name, *places.get(name, [source, tmp_path / "out"]))
    if name == "quantize" or (name == "dequantize" and "SCB" not in kind and "scale" not in kind):
        assert reason in refused(done)
    else:
        assert done.exit_code in (0, 1, 2), done.output
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": ["llama"]}, {"model_type": {"a": 1}}, {"architectures": {"a": 1}},
        {"architectures": [["x"]]}, {"num_hidden_layers": 10**9}, {"num_hidden_layers": "many"},
        {"vocab_size": -1}, {"vocab_size": 10**30}, {"_class_name": ["x"]}, {"hidden_size": None},
        {"text_config": [1]}, {"dtype": ["bfloat16"]},
    ],
    ids=str,
)  # fmt: skip
def test_configs_that_nobody_writes(source: Path, tmp_path: Path, change: dict[str, Any]):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    done = command("quantize", source, tmp_path / "out", "--dry-run")
    assert done.exit_code == 0 or "dtype" in refused(done)


def test_a_config_nested_to_the_limit_of_the_reader(source: Path, tmp_path: Path):
    (source / "config.json").write_text('{"a":' * 500 + "1" + "}" * 500)
    line = refused(command("quantize", source, tmp_path / "out"))
    assert line.endswith("config.json: not JSON: nested more than 64 times")


def broken(*_: object) -> None:
    raise KeyError("some\nthing")


def test_an_error_that_is_not_ours_is_one_line_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planning, "make_plan", broken)
    with pytest.raises(KeyError):
        command("quantize", tmp_path, tmp_path / "out")
    monkeypatch.delenv("NF4CONV_DEBUG")
    line = refused(command("quantize", tmp_path, tmp_path / "out"))
    assert (
        line
        == r"KeyError: 'some\nthing': this is a bug in nf4conv, please report it; NF4CONV_DEBUG=1 "
        r"shows where it is"
    )


# --- values too large for their scales ------------------------------------------------------------


def test_scales_whose_mean_is_infinite_are_refused_or_kept(source: Path, tmp_path: Path):
    shard = source / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors[UP] = torch.full_like(tensors[UP], 2e37)
    save_file(tensors, shard)
    line = refused(command("quantize", source, tmp_path / "out"))
    assert line.startswith(f"{shard}: {UP}: has values that are NaN or infinite, or too large")
    assert not (tmp_path / "out/config.json").exists()
    assert (
        command("quantize", source, tmp_path / "plain", "--no-double-quant", "--verify").exit_code
        == 0
    )
