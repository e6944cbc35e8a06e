"""Two checkpoints in any formats: equal bytes, equal values, and how far the rest is apart."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import save_model
from comparing import compared
from four_bit import pack, write
from safetensors.torch import load_file

import nf4conv
from nf4conv.errors import PlanError, SourceError

CPU = {"device": "cpu", "workers": 2}
TINY = {"device": "cpu", "workers": 3, "buffer_size": 1}
# pieces of at most 361 blocks of 128 values
UNEVEN = {"device": "cpu", "workers": 1, "buffer_size": 3 * 2**16}

both_buffers = pytest.mark.parametrize("run", [CPU, TINY], ids=["large-buffer", "tiny-buffer"])

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
TEN_DIGITS = 1e-9  # of sums: the others depend on how a device adds


def writable(dtype: torch.dtype) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        dtype not in safetensors.torch._SIZE, reason="older than this dtype in safetensors"
    )


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        UP: torch.randn(300, 512, generator=generator).bfloat16(),
        NORM: torch.randn(64, generator=generator).bfloat16(),
        "model.position_ids": torch.arange(100),
        "model.empty": torch.zeros(0, 4).bfloat16(),
    }


def plain(folder: Path, content: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    return save_model(folder, content or tensors(), {"model_type": "llama", **config})


@pytest.mark.parametrize(("run", "position"), [(CPU, 0), (TINY, 153_599)], ids=["first", "last"])
def test_one_value(tmp_path, run, position):
    changed = tensors()
    changed[UP].view(-1)[position] += 1
    found = compared(plain(tmp_path / "a"), plain(tmp_path / "b", changed), **run)
    assert found.unlike == {UP: "different"}
    difference = found.differences[UP]
    step = float(changed[UP].view(-1)[position]) - float(tensors()[UP].view(-1)[position])
    assert (difference.differing, difference.largest) == (1, abs(step))
    assert found.error(UP) == pytest.approx(abs(step) / float(tensors()[UP].double().norm()))


def test_a_cast_that_rounds(tmp_path):
    exact = {
        name: torch.randn(300, 512, generator=torch.Generator().manual_seed(1))
        for name in (UP, "b.weight")
    }
    rounded = {name: x.half() for name, x in exact.items()}
    found = compared(plain(tmp_path / "a", exact), plain(tmp_path / "b", rounded), **TINY)
    error = (exact[UP] - rounded[UP].float()).double()
    assert found.differences[UP].differing == int((error != 0).sum())
    assert found.differences[UP].largest == float(error.abs().max())
    assert found.error(UP) == pytest.approx(
        float(error.norm() / exact[UP].double().norm()), rel=TEN_DIGITS
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_integers_that_are_neighbours_in_float64_differ(tmp_path, dtype):
    a, b = ({"x": torch.tensor([2**53 + one, 5], dtype=dtype)} for one in (0, 1))
    found = compared(plain(tmp_path / "a", a), plain(tmp_path / "b", b), **CPU)
    assert (found.differences["x"].differing, found.differences["x"].largest) == (1, 1.0)
    assert 0 < found.error("x") < 1e-15


def test_nan_equals_nan_and_infinity_itself(tmp_path):
    a = {"x": torch.tensor([math.nan, math.inf, -math.inf, 1.0, 0.0])}
    same = {"x": a["x"].double()}
    other = {"x": torch.tensor([math.nan, math.inf, -math.inf, 1.0, math.nan])}
    changed = {"x": torch.tensor([math.nan, math.inf, math.inf, 1.5, -0.0])}
    paths = [
        plain(tmp_path / str(number), content)
        for number, content in enumerate((a, a, same, other, changed))
    ]
    assert compared(paths[0], paths[1]).statuses == {"x": "identical"}
    assert compared(paths[0], paths[2]).statuses == {"x": "equal in value"}
    difference = compared(paths[0], paths[3]).differences["x"]
    assert (difference.differing, difference.largest) == (1, math.inf)
    difference = compared(paths[0], paths[4]).differences["x"]
    assert difference.differing == 2  # minus zero equals zero
    assert difference.squared_weight == 1.0  # infinities do not drown the error
    assert not compared(paths[0], paths[4]).within(2)


@writable(torch.complex64)
def test_complex_numbers_are_compared_by_their_bytes(tmp_path):
    paths = [
        plain(tmp_path / str(number), {"x": torch.full((4,), complex(number > 1, 1))})
        for number in range(3)
    ]
    assert compared(paths[0], paths[1]).statuses == {"x": "identical"}
    assert compared(paths[0], paths[2]).statuses == {"x": "different"}


def test_a_tensor_in_only_one_and_another_shape(tmp_path):
    mine, theirs = tensors(), tensors()
    del mine[NORM]
    del theirs["model.position_ids"]
    theirs[UP] = theirs[UP].t().contiguous()
    mine["more"], theirs["more"] = torch.zeros(1), torch.zeros(1)
    assert compared(plain(tmp_path / "a", mine), plain(tmp_path / "b", theirs)).statuses == {
        UP: "alone",
        NORM: "alone",
        "model.position_ids": "alone",
        "model.empty": "identical",
        "more": "identical",
    }


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint, packed in several ways, and decoded again."""
    root = tmp_path_factory.mktemp("packed")
    paths = {"source": plain(root / "source")}
    for name, options in {
        "nf4": {},
        "plain-scales": {"double_quant": False},
        "wide": {"blocksize": 128},
        "fp4": {"quant_type": "fp4"},
    }.items():
        nf4conv.quantize(paths["source"], root / name, **options, **CPU)
        paths[name] = root / name
    for dtype in ("bfloat16", "float16", "float32"):
        nf4conv.dequantize(paths["nf4"], root / dtype, dtype=dtype, **CPU)
        paths[dtype] = root / dtype
    return paths


@both_buffers
@pytest.mark.parametrize("component", ["", ".absmax", ".nested_absmax"])
def test_one_byte_of_a_packed_weight(packed, tmp_path, run, component):
    content = load_file(packed["nf4"] / "model.safetensors")
    content[UP + component].view(-1).view(torch.uint8)[-1] ^= 0x11
    changed = write(tmp_path / "changed", content)
    assert compared(packed["nf4"], changed, **run).unlike == {UP: "different"}


@both_buffers
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_packed_weight_has_the_values_of_its_decoded_form(packed, dtype, run):
    for sides in ((packed["nf4"], packed[dtype]), (packed[dtype], packed["nf4"])):
        assert compared(*sides, **run).statuses[UP] == "equal in value"


@both_buffers
def test_a_packed_weight_and_its_source(packed, run):
    found = compared(packed["source"], packed["nf4"], **run)
    weight = load_file(packed["source"] / "model.safetensors")[UP].double()
    error = weight - load_file(packed["bfloat16"] / "model.safetensors")[UP].double()
    assert found.error(UP) == pytest.approx(float(error.norm() / weight.norm()), rel=TEN_DIGITS)
    assert found.differences[UP].largest == float(error.abs().max())
    assert found.unlike == {UP: "different"}


@pytest.mark.parametrize("other", ["plain-scales", "wide", "fp4"])
@pytest.mark.parametrize(
    "run", [CPU, TINY, UNEVEN], ids=["large-buffer", "tiny-buffer", "uneven-buffer"]
)
def test_two_formats(packed, tmp_path, other, run):
    decoded = nf4conv.dequantize(packed[other], tmp_path / "decoded", **CPU).out
    a, b = (
        load_file(Path(folder) / "model.safetensors")[UP].double()
        for folder in (packed["bfloat16"], decoded)
    )
    found = compared(packed["nf4"], packed[other], **run)
    assert found.differences[UP].differing == int((a != b).sum()) > 0
    assert found.error(UP) == pytest.approx(float((a - b).norm() / a.norm()), rel=TEN_DIGITS)


def test_weights_that_a_family_stores_transposed(tmp_path):
    name = "h.0.attn.c_attn.weight"
    source = plain(tmp_path / "source", {name: torch.randn(64, 192).bfloat16()}, model_type="gpt2")
    nf4conv.quantize(source, tmp_path / "packed", **CPU)
    assert load_file(tmp_path / "packed" / "model.safetensors")[f"{name}.absmax"].numel() > 0
    assert compared(source, tmp_path / "packed").error(name) < 0.12
    nf4conv.dequantize(tmp_path / "packed", tmp_path / "decoded", **CPU)
    assert compared(tmp_path / "packed", tmp_path / "decoded").within(0)


@both_buffers
def test_experts_that_one_of_the_two_stacks(tmp_path, run):
    layer = "model.layers.0.feed_forward.experts"
    generator = torch.Generator().manual_seed(0)
    stacked = {
        f"{layer}.gate_up_proj": torch.randn(3, 64, 256, generator=generator).bfloat16(),
        f"{layer}.down_proj": torch.randn(3, 128, 64, generator=generator).bfloat16(),
    }
    source = plain(tmp_path / "source", stacked, model_type="llama4_text")
    nf4conv.quantize(source, tmp_path / "packed", **CPU)
    nf4conv.dequantize(tmp_path / "packed", tmp_path / "decoded", **CPU)
    decoded = load_file(tmp_path / "decoded" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in decoded.items()} == {
        name: tensor.shape for name, tensor in stacked.items()
    }
    for a, b in ((source, tmp_path / "packed"), (tmp_path / "packed", source)):
        found = compared(a, b, **run)
        assert found.within(0.12)
        assert found.statuses == dict.fromkeys(stacked, "different")
    name = f"{layer}.gate_up_proj"
    error = (stacked[name] - decoded[name].double()).norm() / stacked[name].double().norm()
    found = compared(source, tmp_path / "packed", **run).error(name)
    assert found == pytest.approx(float(error), rel=TEN_DIGITS)
    assert not compared(source, source, **run).unlike
    again = compared(tmp_path / "packed", tmp_path / "decoded", **run)
    assert again.statuses == dict.fromkeys(stacked, "equal in value")


@both_buffers
@pytest.mark.parametrize("rows", [128, 1], ids=["blocks", "rows"])
def test_a_weight_that_another_method_encodes(tmp_path, run, rows):
    scale = torch.rand(-(-300 // rows), 4 if rows > 1 else 1) + 0.5
    values = tensors()[UP].to(torch.float8_e4m3fn)
    wide = scale.repeat_interleave(rows, 0)[:300]
    wide = wide.repeat_interleave(128, 1) if rows > 1 else wide
    decoded = (values.float() * wide).bfloat16()
    method = {
        "quant_method": "fp8" if rows > 1 else "compressed-tensors",
        "weight_block_size": [128, 128],
    }
    name = "model.layers.0.mlp.up_proj.weight_scale" + ("_inv" if rows > 1 else "")
    encoded = plain(
        tmp_path / "fp8", {UP: values, name: scale}, quantization_config=method, dtype="bfloat16"
    )
    assert compared(encoded, plain(tmp_path / "plain", {UP: decoded}), **run).within(0)
    assert compared(encoded, encoded, **run).within(0)
    packed = write(tmp_path / "packed", pack(UP, decoded, blocksize=128))
    found = compared(encoded, packed, **run)
    assert 0.05 < found.error(UP) < 0.2
    again = compared(packed, encoded, **run)
    assert again.differences[UP].differing == found.differences[UP].differing


def without_torch(a: Path, b: Path) -> None:
    """Compares two checkpoints in a process of its own, where torch must not be imported."""
    program = (
        "import sys\nfrom nf4conv.cli import main\n"
        f"try:\n    main(['verify', {str(b)!r}, '--source', {str(a)!r}, '--tolerance', '2'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_torch_is_not_imported_where_no_value_has_to_be_compared(packed, tmp_path):
    without_torch(packed["source"], plain(tmp_path / "again"))


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(packed, device):
    with pytest.raises(PlanError, match=f"--device {device}: "):
        compared(packed["nf4"], packed["nf4"], device=device)


def test_a_file_that_is_cut_off_while_it_is_read(packed, tmp_path):
    source = plain(tmp_path / "a")
    raw = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(raw[:-1])
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        compared(source, packed["source"])
