"""Every released format with one part damaged: refused by file and tensor before anything is
written, or, where the part is not needed, decoded to the same values.
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from inputs import ENCODED, SOURCES, Tensor, Tensors, save, save_json

import nf4conv
from nf4conv.errors import Nf4convError

FORMATS: Final = [
    *ENCODED,
    *("deepseek-v4", "kimi", "gpt-oss", "nf4", "fp4"),
]
WEIGHTS: Final = {
    "deepseek-v4": ("layers.0.ffn.experts.1.w2", "layers.0.attn.wq_a"),
    "kimi": ("language_model.model.layers.1.mlp.experts.1.up_proj",),
    "gpt-oss": (
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.0.mlp.experts.gate_up_proj_scales",
    ),
}
"""The beginnings of the parts that are damaged; of any other format, those of up_proj."""

VALUES: Final = ("weight", "weight_packed", "qweight", "_weight_qdata", "blocks")
"""Parts that say how large a weight is. Of another size they are those of another weight."""

WIDTHS: Final = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8}
OTHER_DTYPES: Final = {
    "F32": "I32", "I32": "F32", "F16": "I16", "BF16": "I16", "I64": "F64", "F8_E4M3": "U8",
    "F8_E8M0": "I8", "U8": "F8_E4M3",
}  # fmt: skip


def read(file: Path) -> Tensors:
    raw = file.read_bytes()
    [size] = struct.unpack("<Q", raw[:8])
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = Tensor(entry["dtype"], tuple(entry["shape"]), raw[start:stop])
    return found


def cut(tensor: Tensor, axis: int, size: int) -> Tensor:
    """The first elements of an axis."""
    width = WIDTHS.get(tensor.dtype, 1)
    elements = np.frombuffer(tensor.content, "u1").reshape(*tensor.shape, width)
    place = [slice(None)] * len(tensor.shape)
    place[axis] = slice(size)
    found = np.ascontiguousarray(elements[tuple(place)])
    return Tensor(tensor.dtype, found.shape[:-1], found.tobytes())


def damages(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor in other shapes, and its bytes in another dtype."""
    shape = tensor.shape
    for axis, size in enumerate(shape):
        if size > 1:
            yield f"one less of axis {axis}", cut(tensor, axis, size - 1)
        if size > 2 and size % 2 == 0:
            yield f"half of axis {axis}", cut(tensor, axis, size // 2)
    doubled = (2 * shape[0], *shape[1:]) if shape else (2,)
    yield "doubled", Tensor(tensor.dtype, doubled, 2 * tensor.content)
    if len(shape) > 1 and shape[-1] != shape[-2]:
        turned = (*shape[:-2], shape[-1], shape[-2])
        yield "transposed", Tensor(tensor.dtype, turned, tensor.content)
    yield "another dtype", Tensor(OTHER_DTYPES[tensor.dtype], shape, tensor.content)


class Case:
    """A checkpoint of a format, what it decodes to, and how to convert it with other tensors."""

    def __init__(self, folder: Path, name: str) -> None:
        self.source = folder / "source"
        self.out = folder / "out"
        SOURCES[name](self.source)
        [self.file] = self.source.glob("*.safetensors")
        self.tensors = read(self.file)
        self.config = json.loads((self.source / "config.json").read_text())
        self.starts = WEIGHTS.get(name, ("model.layers.0.mlp.up_proj",))
        self.parts = [part for part in self.tensors if part.startswith(self.starts)]
        self.decoded = self.convert()

    def convert(self) -> dict[str, Tensor]:
        number = len(list(self.out.parent.glob("out*")))
        self.out = self.out.with_name(f"out{number}")
        nf4conv.dequantize(self.source, self.out, device="cpu", workers=1)
        return {
            name: part
            for file in self.out.glob("*.safetensors")
            for name, part in read(file).items()
        }

    def assert_refused_or_same(self, part: str, what: str, *, may_be_same: bool) -> None:
        """Asserts that a line names a file and a tensor of the weight, or that no value changed."""
        refusal = None
        try:
            found = self.convert()
        except Nf4convError as error:
            refusal = error
        if refusal is None:
            assert may_be_same, f"{part}, {what}: it was decoded"
            assert all(found[name] == tensor for name, tensor in self.decoded.items()), (part, what)
            return
        message = str(refusal)
        assert message.startswith(f"{refusal.path}: {refusal.tensor}: "), (part, what, message)
        assert "\n" not in message, (part, what, message)
        assert refusal.path is not None
        assert refusal.path.parent == self.source, (part, what, message)
        assert str(refusal.tensor).startswith(self.starts), (part, what, message)
        assert not self.out.exists(), (part, what)


# what is not needed: values are the same without it, or whatever it is
UNNEEDED: Final = (".input_scale", ".weight_format", ".weight_shape", ".g_idx", ".quant_map")


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_is_missing_or_another(tmp_path: Path, name: str):
    case = Case(tmp_path, name)
    assert len(case.parts) > (name != "fp8 casts")
    for part in case.parts:
        is_values = part.endswith(VALUES)
        may_be_same = part.endswith(UNNEEDED)
        without = {key: one for key, one in case.tensors.items() if key != part}
        if not (is_values and len(case.parts) == 1):
            save(case.file, without)
            case.assert_refused_or_same(part, "missing", may_be_same=may_be_same)
        for what, damaged in () if is_values else damages(case.tensors[part]):
            save(case.file, {**case.tensors, part: damaged})
            case.assert_refused_or_same(part, what, may_be_same=may_be_same)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_there", [False, True], ids=["no shard", "not in its shard"])
def test_a_part_is_in_a_shard_that_does_not_have_it(tmp_path: Path, name: str, is_there: bool):
    case = Case(tmp_path, name)
    part = case.parts[-1]
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    case.file.unlink()
    save(case.source / first, {key: one for key, one in case.tensors.items() if key != part})
    if is_there:
        save(case.source / second, {"other.weight": case.tensors[part]})
    weight_map = {key: second if key == part else first for key in case.tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    save_json(case.source / "model.safetensors.index.json", index)
    if is_there:
        case.assert_refused_or_same(part, "in another shard", may_be_same=False)
        return
    with pytest.raises(Nf4convError, match=f"the shard {second} is missing"):
        case.convert()


Change = Callable[[dict[str, Any]], None]


def with_groups_of(size: int) -> Change:
    """Changes what a config says of the columns that share a scale, wherever it stands."""

    def change(config: dict[str, Any]) -> None:
        for key, value in config.items():
            if isinstance(value, dict):
                change(value)
            elif key == "group_size":
                config[key] = size

    return change


def with_blocks_of(rows: int, columns: int) -> Change:
    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["weight_block_size"] = [rows, columns]

    return change


IN_GROUPS: Final = [
    name for name in FORMATS if name.startswith(("gptq", "autoround", "awq", "int4 c", "int4 w"))
] + ["int8 packed", "torchao", "kimi"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, with_groups_of(16)) for name in IN_GROUPS if name != "int4 channels"),
        *((name, with_groups_of(128)) for name in IN_GROUPS if name != "int4 channels"),
        *((name, with_blocks_of(64, 64)) for name in ("fp8 blocks", "deepseek-v4")),
        ("fp8 blocks", with_blocks_of(256, 256)),
        ("fp8 powers of two", with_blocks_of(128, 128)),
    ],
)
def test_the_config_says_something_else(tmp_path: Path, name: str, change: Change):
    case = Case(tmp_path, name)
    change(case.config)
    case.starts = ("",)  # any weight may be named
    save_json(case.source / "config.json", case.config)
    case.assert_refused_or_same("config.json", "another config", may_be_same=False)


def test_floats_without_scales_beside_scales_of_another_name(tmp_path: Path):
    case = Case(tmp_path, "fp8 casts")
    [part] = case.parts
    scale = part.replace(".weight", ".weight_descale")
    save(case.file, {**case.tensors, scale: Tensor("F32", (1,), b"\0\0\0?")})
    case.assert_refused_or_same(part, "has a scale of another name", may_be_same=False)


def test_integers_that_must_have_zero_points(tmp_path: Path):
    case = Case(tmp_path, "int8 compressed-tensors")
    groups = case.config["quantization_config"]["config_groups"]
    groups["group_0"]["weights"]["symmetric"] = False
    save_json(case.source / "config.json", case.config)
    with pytest.raises(Nf4convError, match="weight: lacks its weight_zero_point"):
        case.convert()
