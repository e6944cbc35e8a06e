"""QuantState and the tensors it is stored as."""

import json

import pytest
import torch

from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
from nf4conv.codec.quant_state import QuantState
from nf4conv.errors import CodecError

PLAIN_JSON = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [5, 77]}'


def state_of(double_quant: bool, quant_type: str = "nf4") -> tuple[torch.Tensor, QuantState]:
    weight = torch.randn(5, 77, generator=torch.Generator().manual_seed(3)).bfloat16()
    return quantize_4bit(weight, quant_type, 64, double_quant)


def test_components_without_double_quantization():
    parts = state_of(double_quant=False)[1].components()
    assert {name: (part.dtype, list(part.shape)) for name, part in parts.items()} == {
        "absmax": (torch.float32, [7]),
        "quant_map": (torch.float32, [16]),
        "quant_state.bitsandbytes__nf4": (torch.uint8, [len(PLAIN_JSON)]),
    }
    blob = bytes(parts["quant_state.bitsandbytes__nf4"].tolist())
    assert blob == PLAIN_JSON


def test_components_with_double_quantization():
    _, state = state_of(double_quant=True, quant_type="fp4")
    parts = state.components()
    assert list(parts) == [
        "absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__fp4",
    ]  # fmt: skip
    assert (parts["absmax"].dtype, list(parts["absmax"].shape)) == (torch.uint8, [7])
    assert (parts["nested_absmax"].dtype, list(parts["nested_absmax"].shape)) == (
        torch.float32,
        [1],
    )
    assert list(parts["nested_quant_map"].shape) == [256]
    offset = repr(state.offset.item())
    assert bytes(parts["quant_state.bitsandbytes__fp4"].tolist()).decode() == (
        '{"quant_type": "fp4", "blocksize": 64, "dtype": "bfloat16", "shape": [5, 77], '
        '"nested_blocksize": 256,'
        f' "nested_dtype": "float32", "nested_offset": {offset}}}'
    )


@pytest.mark.parametrize("double_quant", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize(
    "prefix", ["", "model.layers.0.mlp.up_proj.weight."], ids=["bare", "prefixed"]
)
def test_round_trip(double_quant, prefix):
    packed, state = state_of(double_quant)
    again = QuantState.from_components(
        {prefix + name: part for name, part in state.components().items()}
    )
    assert (again.shape, again.dtype, again.blocksize, again.quant_type, again.nested) == (
        state.shape, state.dtype, state.blocksize, state.quant_type, double_quant,
    )  # fmt: skip
    for name, part in state.components().items():
        assert torch.equal(again.components()[name], part)
    assert torch.equal(dequantize_4bit(packed, again), dequantize_4bit(packed, state))


def test_offset_survives_a_low_precision_default_dtype():
    _, state = state_of(double_quant=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = QuantState.from_components(state.components())
    finally:
        torch.set_default_dtype(torch.float32)
    assert again.offset.dtype == torch.float32
    assert again.offset.item() == state.offset.item()


def test_stored_nested_map_is_used():
    packed, state = state_of(double_quant=True)
    parts = state.components()
    parts["nested_quant_map"] = torch.zeros(256)
    decoded = dequantize_4bit(packed, QuantState.from_components(parts)).float()
    assert decoded.abs().max().bfloat16() == state.offset.bfloat16()


def with_json(**changes: object) -> dict[str, torch.Tensor]:
    parts = state_of(double_quant=True)[1].components()
    tag = "quant_state.bitsandbytes__nf4"
    fields = json.loads(bytes(parts[tag].tolist())) | changes
    fields = {key: value for key, value in fields.items() if value != "removed"}
    return parts | {tag: torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)}


def without(name: str) -> dict[str, torch.Tensor]:
    return {
        key: part
        for key, part in state_of(double_quant=True)[1].components().items()
        if key != name
    }


CONTRADICTIONS = [
    (without("quant_state.bitsandbytes__nf4"), "0 quant_state tensors"),
    (without("absmax"), "absmax is missing"),
    (without("nested_absmax"), "there is no nested_absmax"),
    (without("nested_quant_map"), "nested_quant_map is missing"),
    (without("") | {"scales": torch.ones(1)}, "scales: not a component"),
    (with_json(quant_type="int4"), "quant_type is 'int4'"),
    (with_json(blocksize=48), "blocksize is 48"),
    (with_json(blocksize=True), "blocksize is True"),
    (with_json(blocksize=[64]), "blocksize is [64]"),
    (with_json(blocksize=64.0), "blocksize is 64.0"),
    (with_json(quant_type=["nf4"]), "quant_type is ['nf4']"),
    (with_json(dtype="float64"), "dtype is 'float64'"),
    (with_json(dtype=None), "dtype is None"),
    (with_json(shape=None), "None is not a shape"),
    (with_json(shape=[5, -77]), "[5, -77] is not a shape"),
    (with_json(shape=[5, True]), "[5, True] is not a shape"),
    (with_json(nested_blocksize=128), "nested_blocksize is 128"),
    (with_json(nested_offset="removed"), "nested_offset"),
    (with_json(nested_offset="much"), "'much', which is no float32"),
    (with_json(nested_offset=1e39), "1e+39, which is no float32"),
    (with_json(comment="hi"), "comment"),
]


@pytest.mark.parametrize(("parts", "message"), CONTRADICTIONS)
def test_contradictions_are_errors(parts, message):
    with pytest.raises(CodecError) as error:
        QuantState.from_components(parts)
    assert message in str(error.value)


def test_json_that_is_not_json_is_an_error():
    parts = state_of(double_quant=False)[1].components()
    parts["quant_state.bitsandbytes__nf4"] = torch.tensor([123, 255], dtype=torch.uint8)
    with pytest.raises(CodecError, match="not JSON"):
        QuantState.from_components(parts)
