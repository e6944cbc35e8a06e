"""The engine without torch against that with it: the same bytes.

Without a GPU the driver and the compiler are played (host_driver.py), and torch computes on the
CPU.
"""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import host_driver
import integers
import pytest
import torch
from checkpoints import contents, save_model
from safetensors.torch import load_file, save_file
from test_lora import write_adapter

import nf4conv
from nf4conv.errors import CodecError, SourceError
from nf4conv.report.as_json import to_json
from nf4conv.run.device.on_driver import driver
from nf4conv.run.device.on_driver.device import DriverBackend
from nf4conv.run.device.on_torch import device as torch_device
from nf4conv.sources.header import build_header

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ON_GPU = torch.cuda.is_available()
PIECE = 2**21 if ON_GPU else 2**16
BARE = {"device": "cuda", "workers": 2, "buffer_size": 2 * PIECE}
Parts = Callable[[int, int], dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[DriverBackend]:
    """The engines that were made, which show that torch's did not do the work."""
    if not ON_GPU:
        host_driver.install(monkeypatch)
    made: list[DriverBackend] = []
    genuine = DriverBackend.__init__

    def remember(self: DriverBackend, *arguments: Any) -> None:
        genuine(self, *arguments)
        made.append(self)

    monkeypatch.setattr(DriverBackend, "__init__", remember)
    return made


def by_torch(command: Callable[..., Any], *places: Path, **options: Any) -> Any:
    """The same without the driver: torch does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "device_count", lambda: 0)
        run = {**BARE, "device": "cuda" if ON_GPU else "cpu"}
        return command(*places, **options, **run)


def write(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    quantization: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float16,
) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(dtype)[6:],
        "vocab_size": 64,
    }
    if quantization:
        config["quantization_config"] = quantization
    return save_model(folder, tensors, config)


SHAPES = {
    "model.layers.0.mlp.down_proj.weight": (64, 64),
    "model.layers.0.self_attn.o_proj.weight": (2304, 1024)
    if ON_GPU
    else (288, 128),  # several pieces
    "model.layers.0.mlp.up_proj.weight": (33, 65),
    "model.layers.0.self_attn.q_proj.weight": (37, 5),
    "model.layers.0.self_attn.k_proj.weight": (16, 130),
}
GENERATOR = torch.Generator().manual_seed(1)


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {
        name: (torch.randn(shape, generator=GENERATOR) * 0.05).to(dtype)
        for name, shape in SHAPES.items()
    }
    return found | {
        "model.norm.weight": torch.linspace(-2, 2, 257).to(dtype),
        "model.embed_tokens.weight": (torch.arange(5 * PIECE // 4) % 1000 / 8)
        .to(dtype)
        .view(-1, 64),  # several pieces,
    }


def same(one: Path, other: Path) -> None:
    ours, theirs = contents(one), contents(other)
    assert ours.keys() == theirs.keys()
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), b[name].view(-1).view(torch.uint8)), (
            name
        )
    assert ours == theirs


def both(command: Callable[..., Any], source: Path, run: Any = BARE, **options: Any) -> Any:
    """Runs a command without torch, and by torch: the same bytes; returns the first report."""
    name = f"{command.__name__} {source.name}"
    bare, other = source.parent / f"bare {name}", source.parent / f"torch {name}"
    by_torch(command, source, other, **options)
    report = command(source, bare, **options, **run)
    same(bare, other)
    return report


def same_weights(one: Path, other: Path) -> None:
    a, b = (folder / "model.safetensors" for folder in (one, other))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(("dtype", "options"), [
    (torch.float16, {}),
    (torch.float32, {"quant_type": "fp4", "blocksize": 128, "double_quant": False}),
    pytest.param(torch.bfloat16, {}, marks=pytest.mark.gpu),
], ids=["nested", "plain", "bfloat16"])  # fmt: skip
def test_packing(
    tmp_path: Path, gpu: list[DriverBackend], dtype: torch.dtype, options: dict[str, Any]
):
    both(nf4conv.quantize, write(tmp_path / "source", weights(dtype), dtype=dtype), **options)
    assert len(gpu) == 1


def _raw(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=GENERATOR)


def _eight_bit(
    dtype: torch.dtype, scale: Callable[[int, int], torch.Tensor], suffix: str = "weight_scale"
) -> Parts:
    """The parts of a matrix of 8-bit values, by the last part of their names."""
    high = 256 if dtype == torch.int8 else 120
    return lambda rows, columns: {
        "weight": _raw(rows, columns, high=high).view(dtype),
        suffix: scale(rows, columns),
    }


def _four_bit(
    suffix: str, group: int, scale: torch.dtype, factors: dict[str, torch.Tensor]
) -> Parts:
    def parts(rows: int, columns: int) -> dict[str, torch.Tensor]:
        scales = (
            _raw(rows, columns // group, high=8) + 124
            if group == 32
            else _raw(rows, columns // group, high=120)
        )
        return {suffix: _raw(rows, columns // 2), "weight_scale": scales.view(scale)} | {
            role: factor.clone() for role, factor in factors.items()
        }

    return parts


E4M3 = torch.float8_e4m3fn
COMPRESSED = {"quant_method": "compressed-tensors"}
KINDS: dict[str, tuple[dict[str, Any], Parts]] = {
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        _eight_bit(
            E4M3,
            lambda rows, columns: torch.rand(-(-rows // 128), -(-columns // 128)),
            "weight_scale_inv",
        ),
    ),
    "fp8 channels": (COMPRESSED, _eight_bit(E4M3, lambda rows, _: torch.rand(rows, 1))),
    "fp8 tensor": (COMPRESSED, _eight_bit(torch.float8_e5m2, lambda *_: torch.rand(1))),
    "fp8 plain": ({}, lambda *shape: {"weight": _raw(*shape, high=120).view(E4M3)}),
    "mxfp8": (
        COMPRESSED,
        _eight_bit(E4M3, lambda rows, columns: _raw(rows, columns // 32, high=8) + 118),
    ),
    "int8": (COMPRESSED, _eight_bit(torch.int8, lambda rows, _: torch.rand(rows, 1).half())),
    "mxfp4": (COMPRESSED, _four_bit("weight_packed", 32, torch.uint8, {})),
    "nvfp4": (
        COMPRESSED,
        _four_bit("weight_packed", 16, E4M3, {"weight_global_scale": torch.tensor([17.0])}),
    ),
    "modelopt": (
        {"quant_method": "modelopt"},
        _four_bit("weight", 16, E4M3, {"weight_scale_2": torch.tensor(0.05)}),
    ),
    "bitsandbytes 8-bit": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        _eight_bit(torch.int8, lambda rows, _: torch.rand(rows), "SCB"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_sources(tmp_path: Path, gpu: list[DriverBackend], kind: str):
    description, parts = KINDS[kind]
    tensors = {"model.norm.weight": torch.ones(64, dtype=torch.float16)}
    for name, shape in (
        ("mlp.up_proj", (136, 160)),
        ("mlp.down_proj", (72, 96)),
        ("self_attn.o_proj", (65, 64)),
    ):
        tensors |= {
            f"model.layers.0.{name}.{suffix}": part for suffix, part in parts(*shape).items()
        }
    both(nf4conv.quantize, write(tmp_path / "source", tensors, description))
    assert len(gpu) == 1


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}},
}
INTEGERS: dict[str, tuple[dict[str, Any], Callable[..., integers.Weight]]] = {
    "GPTQ": (GPTQ, integers.gptq),
    "GPTQ in 3 bits": (
        GPTQ | {"bits": 3, "checkpoint_format": "gptq_v2"},
        partial(integers.gptq, bits=3, version=2, is_reordered=True),
    ),
    "AWQ": ({"quant_method": "awq", "group_size": 32}, integers.awq),
    "rows in 3 bits": (
        PACKED | {"config_groups": {"a": {"weights": {"num_bits": 3, "group_size": 32}}}},
        partial(integers.compressed, bits=3, is_symmetric=False),
    ),
    "rows": (PACKED, integers.compressed),
    "rows in 8 bits with zero points": (
        PACKED,
        partial(integers.compressed, bits=8, is_symmetric=False, is_reordered=True),
    ),
    "torchao": (TORCHAO, integers.torchao),
}


def integer_source(folder: Path, kind: str) -> Path:
    description, make = INTEGERS[kind]
    tensors = {"model.norm.weight": torch.ones(64, dtype=torch.float16)}
    several_pieces = (544, 128) if kind in ("GPTQ", "AWQ", "torchao") else (288, 128)
    for name, shape in (
        ("mlp.up_proj", (160, 160)),
        ("mlp.down_proj", (96, 64)),
        ("self_attn.o_proj", (2304, 1024) if ON_GPU else several_pieces),
    ):
        parts = make(*shape, dtype=torch.float16).parts
        tensors |= {f"model.layers.0.{name}.{suffix}": part for suffix, part in parts.items()}
    return write(folder, tensors, description)


@pytest.mark.parametrize("command", [nf4conv.quantize, nf4conv.dequantize])
@pytest.mark.parametrize("kind", INTEGERS)
def test_packed_integers(
    tmp_path: Path, gpu: list[DriverBackend], kind: str, command: Callable[..., Any]
):
    both(command, integer_source(tmp_path / "source", kind))
    assert len(gpu) == 1


@pytest.mark.parametrize("kind", ["GPTQ", "rows"])
def test_verification_of_what_was_decoded(
    tmp_path: Path, gpu: list[DriverBackend], kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Decoded again without torch; torch counts how much of a damaged tensor differs."""
    source = integer_source(tmp_path / "source", kind)
    out = tmp_path / "out"
    by_torch(nf4conv.dequantize, source, out)
    with monkeypatch.context() as patch:
        without_torch(patch)
        report = nf4conv.verify(out, source=source, exact=True, **BARE)
    assert report.passed
    assert len(report.tensors) == 4
    assert len(gpu) == 1
    tensors = load_file(out / "model.safetensors")
    damaged = "model.layers.0.self_attn.o_proj.weight"
    tensors[damaged].view(-1)[-3:] += 1
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    if not ON_GPU:
        monkeypatch.setattr(torch_device, "find_device", lambda _: torch.device("cpu"))
    found = nf4conv.verify(out, source=source, **BARE)
    expected = by_torch(nf4conv.verify, out, source=source)
    assert [finding.tensor for finding in found.findings] == [damaged]
    assert found.findings == expected.findings
    assert found.tensors == expected.tensors
    assert sum(row.errors.differing for row in found.tensors) == 3


def test_a_group_index_that_was_never_set(tmp_path: Path):
    source = integer_source(tmp_path / "source", "rows")
    tensors = load_file(source / "model.safetensors")
    out = tmp_path / "in-order"
    nf4conv.dequantize(source, out, **BARE)
    for name in list(tensors):
        if name.endswith("_packed"):
            columns = 8 * tensors[name].shape[1]
            unset = torch.full((columns,), -1, dtype=torch.int32)
            tensors[name.replace("_packed", "_g_idx")] = unset
    save_file(tensors, source / "model.safetensors")
    nf4conv.dequantize(source, tmp_path / "unset", **BARE)
    found = load_file(tmp_path / "unset/model.safetensors")
    expected = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_group_index_out_of_range(tmp_path: Path):
    source = integer_source(tmp_path / "source", "GPTQ")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.g_idx"][5] = 5
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CodecError, match=r"up_proj\.weight: its group index names a group"):
        nf4conv.quantize(source, tmp_path / "out", **BARE)


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
def test_four_bit_sources_repacked_and_decoded(
    tmp_path: Path, gpu: list[DriverBackend], double_quant: bool
):
    source, packed = write(tmp_path / "source", weights(torch.float16)), tmp_path / "packed"
    by_torch(nf4conv.quantize, source, packed, double_quant=double_quant)
    both(nf4conv.quantize, packed, blocksize=128)
    both(nf4conv.dequantize, packed)
    assert len(gpu) == 2


CASTS = [(torch.float32, "float16"), (torch.float16, "float32")] + [
    pytest.param(*pair, marks=pytest.mark.gpu)  # the interpreter rounds to bfloat16 otherwise
    for pair in (
        (torch.float32, "bfloat16"), (torch.bfloat16, "float16"), (torch.float16, "bfloat16"),
        (torch.bfloat16, "float32"),
    )
]  # fmt: skip


def bit_patterns(stored: torch.dtype, cast: torch.dtype) -> torch.Tensor:
    """All values of a 16-bit dtype, or many of float32, but those that become infinite; without a
    GPU no NaN.
    """
    size, shift = (torch.int16, 0) if stored.itemsize == 2 else (torch.int32, 13)
    some = torch.arange(-(2**15), 2**15) << shift
    bits = torch.cat([some, some ^ 0x1000, some | 0xFFF]) if shift else some
    values = bits.to(size).view(stored)
    lost = values.isfinite() & ~values.to(cast).isfinite()
    return values[~lost if ON_GPU else ~lost & ~values.isnan()]


@pytest.mark.parametrize(("stored", "dtype"), CASTS, ids=str)
def test_casts(
    tmp_path: Path,
    gpu: list[DriverBackend],
    monkeypatch: pytest.MonkeyPatch,
    stored: torch.dtype,
    dtype: str,
):
    """Of weights before they are packed, of what is kept, and of what is decoded; and what comes of
    it is proved.
    """
    tensors = weights(stored) | {
        "model.layers.0.input_layernorm.weight": bit_patterns(stored, getattr(torch, dtype))
    }
    source, packed = write(tmp_path / "source", tensors, dtype=stored), tmp_path / "packed"
    by_torch(nf4conv.quantize, source, packed)
    quantized = both(nf4conv.quantize, source, dtype=dtype).out
    again = {"dtype": dtype, "blocksize": 128, "exclude": ("*q_proj*",)}
    both(nf4conv.quantize, packed, **again)
    both(nf4conv.dequantize, packed, dtype=dtype)
    without_torch(monkeypatch)
    assert nf4conv.verify(Path(quantized), source=source, exact=True, **BARE).passed
    audited = {**BARE, "verify": True}
    nf4conv.quantize(source, tmp_path / "audited", dtype=dtype, **audited)
    assert len(gpu) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_experts_of_gpt_oss(
    tmp_path: Path, gpu: list[DriverBackend], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
):
    """They are stored [out, in], decoded to [in, out], and kept so; one is larger than the buffer
    it comes down to.
    """
    experts, q_proj = "model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj.weight"
    large = (1, 600, 128) if ON_GPU else (1, 168, 32)
    tensors = {q_proj: torch.ones(64, 64, dtype=dtype)}
    for name, shape in {"gate_up_proj": large, "down_proj": (3, 37, 3)}.items():
        tensors[f"{experts}.{name}_blocks"] = _raw(math.prod(shape), 16).view(*shape, 16)
        tensors[f"{experts}.{name}_scales"] = _raw(math.prod(shape), high=8).view(shape) + 120
    source = write(tmp_path / "source", tensors, {"quant_method": "mxfp4"}, dtype)
    monkeypatch.setattr("nf4conv.run.device.on_driver.buffers._OUTPUT_SLACK", 4096)
    both(nf4conv.quantize, source)
    if dtype == torch.float16:  # which cannot hold all that is stored
        tensors[f"{experts}.gate_up_proj_scales"][0, 5, 7] = 150
        lost = write(tmp_path / "lost", tensors, {"quant_method": "mxfp4"}, dtype)
        refused = r"experts\.gate_up_proj: has values too large for float16"
        with pytest.raises(SourceError, match=refused):
            nf4conv.quantize(lost, tmp_path / "out", **BARE)
    with monkeypatch.context() as patch:
        without_torch(patch)
        nf4conv.quantize(source, tmp_path / "audited", **BARE, verify=True)
    assert len(gpu) == (3 if dtype == torch.float16 else 2)


@pytest.mark.parametrize(
    "name", [*list(SHAPES)[1:3], "model.norm.weight", "model.embed_tokens.weight"]
)
def test_values_that_a_cast_makes_infinite(tmp_path: Path, gpu: list[DriverBackend], name: str):
    tensors = weights(torch.float32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 65519.0, 6e-8])
    tensors["model.layers.0.input_layernorm.weight"] = special  # what is infinite may stay so
    source = write(tmp_path / "source", tensors, dtype=torch.float32)
    options = {"dtype": "float16"}
    nf4conv.quantize(source, tmp_path / "kept", **options, **BARE)
    tensors[name].view(-1)[-1] = 65520.0
    save_file(tensors, source / "model.safetensors")
    refusal = (
        rf"model.safetensors: {name}: has values (that are NaN or infinite, or )?too large for "
        "float16.* give another"
    )
    with pytest.raises(SourceError, match=refusal):
        by_torch(nf4conv.quantize, source, tmp_path / "torch", **options)
    with pytest.raises(SourceError, match=refusal):
        nf4conv.quantize(source, tmp_path / "bare", **options, **{**BARE, "device": "auto"})
    assert len(gpu) == 2


@pytest.mark.parametrize(
    "stored",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
def test_decoded_values_too_large_for_the_dtype(tmp_path: Path, stored: torch.dtype):
    """Scales are float32. What is decoded to the dtype that it was packed from is as bitsandbytes
    decodes it.
    """
    source, packed = write(tmp_path / "source", weights(stored), dtype=stored), tmp_path / "packed"
    by_torch(nf4conv.quantize, source, packed, double_quant=False)
    tensors = load_file(packed / "model.safetensors")
    tensors[f"{DOWN}.absmax"][3] = 1e38
    save_file(tensors, packed / "model.safetensors")
    without = partial(nf4conv.dequantize, **BARE)
    for engine, command in (("bare", without), ("torch", partial(by_torch, nf4conv.dequantize))):
        command(packed, tmp_path / f"{engine} wide", dtype="float32")
        refused = pytest.raises(SourceError, match=rf"{DOWN}: has values too large for float16")
        with nullcontext() if stored == torch.float16 else refused:
            command(packed, tmp_path / engine, dtype="float16")
    same(tmp_path / "bare wide", tmp_path / "torch wide")


MIXED = {"device": "auto", "workers": 2, "buffer_size": 2 * PIECE}
"""The device of torch is found by itself: without a GPU the driver's is none of torch's."""


def in_family(folder: Path, architecture: str, model_type: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["float64", "transposed", "merged"])
def test_torch_takes_all_where_one_tensor_takes_it(
    tmp_path: Path, gpu: list[DriverBackend], kind: str
):
    tensors = weights(torch.float16)
    options: dict[str, Any] = {}
    if kind == "float64":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    if kind == "transposed":
        tensors = {
            "h.0.attn.c_attn.weight": torch.randn(64, 192, generator=GENERATOR).half(),
            "wte.weight": torch.randn(100, 64, generator=GENERATOR).half(),
        }
    if kind == "merged":
        module = "model.layers.0.mlp.down_proj"
        factors = {
            f"{module}.lora_A.weight": torch.randn(4, 64, generator=GENERATOR),
            f"{module}.lora_B.weight": torch.randn(64, 4, generator=GENERATOR),
        }
        options["lora"] = (str(write_adapter(tmp_path / "adapter", factors)),)
    source = write(tmp_path / "source", tensors)
    if kind == "transposed":
        in_family(source, "GPT2LMHeadModel", "gpt2")
    report = nf4conv.quantize(source, tmp_path / "out", **options, **MIXED, verify=True)
    assert report.totals.packed
    assert not gpu


def test_weights_in_4_bits_among_others(tmp_path: Path, gpu: list[DriverBackend]):
    """Weights that stay as they are divide the weights around them, which are packed."""
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(4)]
    tensors = {name: torch.randn(64, 64, generator=GENERATOR).half() for name in names}
    source = write(tmp_path / "source", tensors)
    by_torch(nf4conv.quantize, source, tmp_path / "packed")
    packed = load_file(tmp_path / "packed/model.safetensors")
    mixed = tmp_path / "mixed"
    shutil.copytree(tmp_path / "packed", mixed)
    (mixed / "nf4conv.json").unlink()
    plain = (names[0], names[2])
    chosen = {key: part for key, part in packed.items() if not key.startswith(plain)}
    chosen |= {name: tensors[name] for name in plain}
    save_in_order(mixed / "model.safetensors", dict(sorted(chosen.items())))
    for run, out in ((BARE, "bare"), ({**MIXED, "device": "cpu"}, "torch")):
        report = nf4conv.quantize(mixed, tmp_path / out, **run)
        assert report.totals.packed == 4
        written = load_file(tmp_path / out / "model.safetensors")
        assert written.keys() == packed.keys()
        for name, tensor in packed.items():
            assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert nf4conv.verify(tmp_path / "bare", source=mixed, exact=True, **BARE).passed
    assert len(gpu) == 2


def save_in_order(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a file with its tensors in the order given, which safetensors itself changes."""
    content, entries = bytearray(), []
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        tag = {torch.uint8: "U8", torch.float32: "F32", torch.float16: "F16"}[tensor.dtype]
        entries.append((name, tag, tuple(tensor.shape), len(content), len(content) + len(raw)))
        content += raw
    file.write_bytes(build_header(entries) + content)


CLOSE = 1e-12 if ON_GPU else 1e-6  # torch adds up in float64 there, here in float32


def same_figures(one: Any, other: Any) -> None:
    """Two reports but for how long they took, and on which device."""
    a, b = json.loads(to_json(one)), json.loads(to_json(other))
    for key in a.keys() - {"seconds", "device", "options", "weights", "kinds"}:
        assert a[key] == b[key], key
    for mine, theirs in zip(
        [*one.weights, *one.kinds], [*other.weights, *other.kinds], strict=True
    ):
        same_row(mine, theirs)


def same_row(one: Any, other: Any) -> None:
    """Two rows; figures in float64 depend in their last digits on what adds up."""
    a, b = asdict(one), asdict(other)
    for found, expected in ((a.pop("errors", a), b.pop("errors", b)), (a, b)):
        floats = {key: value for key, value in expected.items() if isinstance(value, float)}
        assert {key: found[key] for key in floats} == pytest.approx(floats, rel=CLOSE)
        assert {**found, **floats} == expected


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be an error if torch is to compute."""
    monkeypatch.setattr(torch_device, "find_device", None)


@pytest.mark.parametrize(("options", "kind"), [
    ({}, None),
    ({"quant_type": "fp4", "blocksize": 128, "double_quant": False}, None),
    ({}, "fp8 channels"),
    pytest.param({"blocksize": 512, "scales": "search"}, None, marks=pytest.mark.gpu),
], ids=["nested", "plain", "encoded", "search"])  # fmt: skip
def test_what_is_right_is_proved(
    tmp_path: Path,
    gpu: list[DriverBackend],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    kind: str | None,
):
    description, parts = KINDS[kind or "fp8 channels"]
    encoded = {f"model.layers.0.mlp.up_proj.{role}": part for role, part in parts(136, 160).items()}
    if kind is None:
        source = write(tmp_path / "source", weights(torch.float16))
    else:
        source = write(tmp_path / "source", encoded, description)
    audited = {**BARE, "verify": True}
    by_torch(nf4conv.quantize, source, tmp_path / "torch", **options)
    with monkeypatch.context() as patch:
        without_torch(patch)
        written = nf4conv.quantize(source, tmp_path / "out", **options, **audited)
        found = nf4conv.verify(tmp_path / "out", source=source, exact=True, **BARE)
    assert len(gpu) == 2
    assert found.passed
    assert found.identical
    same_weights(tmp_path / "out", tmp_path / "torch")
    other = by_torch(nf4conv.verify, tmp_path / "out", source=source, exact=True)
    same_figures(found, other)
    assert written.verification is not None
    largest = max(row.error or 0.0 for row in other.weights)
    assert written.verification.largest_relative_error == pytest.approx(largest, abs=1e-6)


DOWN = "model.layers.0.mlp.down_proj.weight"
OUT = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize("name", [
    DOWN, f"{OUT}.nested_absmax", f"{DOWN}.quant_state.bitsandbytes__nf4",
    "model.embed_tokens.weight",
])  # fmt: skip
def test_what_is_wrong_is_found_as_by_torch(tmp_path: Path, gpu: list[DriverBackend], name: str):
    source = write(tmp_path / "source", weights(torch.float16))
    nf4conv.quantize(source, tmp_path / "out", **BARE)
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    damaged = tensors[name].view(-1).view(torch.uint8)
    damaged[damaged.numel() // 2] ^= 1
    save_file(tensors, file)
    exact = {"exact": True}
    found = nf4conv.verify(tmp_path / "out", source=source, **exact, **MIXED)
    assert len(gpu) == 2
    assert not found.passed
    same_figures(found, by_torch(nf4conv.verify, tmp_path / "out", source=source, **exact))
