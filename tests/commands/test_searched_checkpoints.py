"""`quantize --scales search`: the same tensors with other values, which `verify` holds to what was
promised.
"""

import shutil
from pathlib import Path

import pytest
import torch
from adapters import load, make_model
from checkpoints import assert_same_tensors, components, tensors_of, write_source
from four_bit import error_sums
from safetensors.torch import load_file, save_file
from test_encoded import dequantized, source_of

import nf4conv
from nf4conv import quantize_4bit
from nf4conv.codec import cpu, reference
from nf4conv.codec.ops import dequantize_4bit
from nf4conv.codec.quant_state import Decoding, QuantState
from nf4conv.format.codebook import BLOCKSIZES
from nf4conv.report.tolerance import TOLERANCES

CPU = {"device": "cpu", "workers": 2}
SEARCH = {"scales": "search"}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("searched") / "source")


@pytest.fixture(scope="module")
def searched(source: Path) -> Path:
    out = source.parent / "searched"
    nf4conv.quantize(source, out, **SEARCH, **CPU)
    return out


def faults(folder: Path, source: Path | None = None, **options: object) -> set[str]:
    report = nf4conv.verify(folder, source=source, **options, **CPU)
    return {finding.check for finding in report.findings if finding.is_fault}


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_tensors_are_those_of_quantize_4bit_and_as_large_as_ever(
    source, tmp_path, quant_type, double_quant
):
    options = {"quant_type": quant_type, "blocksize": 32, "double_quant": double_quant}
    nf4conv.quantize(source, tmp_path / "absmax", **options, **CPU)
    nf4conv.quantize(source, tmp_path / "search", **{**options, "scales": "search"}, **CPU)
    found, others, originals = (
        tensors_of(folder) for folder in (tmp_path / "search", tmp_path / "absmax", source)
    )
    shapes = [
        {
            name: (tensor.dtype, tensor.shape)
            for name, tensor in made.items()
            if "quant_state" not in name
        }
        for made in (found, others)
    ]
    assert shapes[0] == shapes[1]
    packed, state = quantize_4bit(originals[UP], quant_type, 32, double_quant, scales="search")
    assert torch.equal(found[UP], packed)
    for suffix, part in state.components().items():
        assert torch.equal(found[f"{UP}.{suffix}"], part), suffix


@pytest.mark.parametrize(
    "name",
    ["fp8 blocks", "int8 compressed-tensors", "nvfp4 modelopt", "mxfp4 rows", "gpt-oss"],
)
def test_sources_of_other_kinds_are_searched_as_their_decoded_weights(tmp_path, name):
    folder = source_of(tmp_path / "source", name)
    # what is in 4 bits already would otherwise stay in its own format
    options = {**SEARCH, "quant_type": "nf4", "blocksize": 128, "moe": "packed"}
    nf4conv.quantize(folder, tmp_path / "out", **options, **CPU)
    nf4conv.quantize(dequantized(folder), tmp_path / "expected", **options, **CPU)
    found = tensors_of(tmp_path / "out")
    assert any(part.endswith(".absmax") for part in found)
    assert_same_tensors(found, tensors_of(tmp_path / "expected"))
    assert faults(tmp_path / "out", folder, exact=True) == set()


@pytest.fixture(scope="module")
def plain(source: Path) -> Path:
    """Without double quantization."""
    out = source.parent / "plain"
    nf4conv.quantize(source, out, **{**SEARCH, "double_quant": False}, **CPU)
    return out


def test_negative_scales_are_no_fault_where_they_were_searched(source, searched, plain):
    for folder in (searched, plain):
        assert not nf4conv.inspect(folder).findings
        assert faults(folder) == set()
        assert faults(folder, source, exact=True) == set()


def test_negative_scales_are_a_fault_where_nothing_says_that_they_were_searched(
    searched, plain, tmp_path
):
    # the first it has is its nested_offset
    for folder, fault in ((searched, "quant state"), (plain, "scales")):
        quiet = Path(shutil.copytree(folder, tmp_path / folder.name))
        (quiet / "nf4conv.json").unlink()
        assert fault in faults(quiet)
    assert {finding.check for finding in nf4conv.inspect(tmp_path / "searched").findings} == {
        "quant state"
    }


def test_verify_finds_a_scale_of_the_wrong_sign(source, plain, tmp_path):
    out = Path(shutil.copytree(plain, tmp_path / "out"))
    file = next(path for path in out.glob("*.safetensors") if UP in load_file(path))
    tensors = load_file(file)
    tensors[f"{UP}.absmax"][3] *= -1
    save_file(tensors, file, {"format": "pt"})
    assert faults(out) == set()
    assert faults(out, source) >= {"scales", "bound"}


def test_quantize_with_verify_holds_them_to_the_search(source, tmp_path):
    report = nf4conv.quantize(source, tmp_path / "out", **SEARCH, **CPU, verify=True)
    assert report.verification is not None
    assert 0.083 < report.verification.largest_relative_error < 0.09


def error_of_searched(weight: torch.Tensor, quant_type: str, blocksize: int) -> float:
    count, found = weight.numel(), weight.clone()
    packed, scales = torch.empty(count // 2, dtype=torch.uint8), torch.empty(count // blocksize)
    cpu.quantize_blocks(weight, packed, scales, quant_type, blocksize, searches=True)
    reference.dequantize_blocks(packed, Decoding(scales, quant_type, blocksize), found)
    return float((weight.double() - found.double()).norm() / weight.double().norm())


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", BLOCKSIZES, ids="b{}".format)
def test_the_default_tolerance_is_what_heavy_tails_give(quant_type, blocksize):
    """Takes 2^20 weights at equal steps of the distribution's quantiles, in random order."""
    count = 1 << 20
    p = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    spread = 4 * p * (1 - p)
    quantile = torch.cos(torch.arccos(spread.sqrt()) / 3) / spread.sqrt()
    weight = (
        2 * torch.sign(p - 0.5) * (quantile - 1).clamp(min=0).sqrt()
    ).float()  # Student's t, 4 degrees
    weight = weight[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    tolerance = TOLERANCES["search", quant_type][BLOCKSIZES.index(blocksize)]
    assert tolerance - 0.003 < error_of_searched(weight, quant_type, blocksize) <= tolerance


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_no_value_of_either_sign_is_outside_the_bound(quant_type):
    """Whatever the scales' signs; and one that was moved far away is."""
    weight = torch.randn(1 << 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    packed, state = quantize_4bit(weight, quant_type, 64, scales="search")
    assert int(error_sums(weight, packed, state, "search").outside) == 0
    weight[100] = 40
    assert int(error_sums(weight, packed, state, "search").outside) == 1


@pytest.mark.oracle
def test_transformers_and_bitsandbytes_generate_from_it(tmp_path):
    """On the CPU, in float32: the same tokens as from the decoded weights."""
    sizes = {"intermediate_size": 128, "bos_token_id": None, "eos_token_id": None}
    make_model(tmp_path / "source", "llama", **sizes)
    options = {**SEARCH, "compute_dtype": "float32"}
    nf4conv.quantize(tmp_path / "source", tmp_path / "out", **options, **CPU)
    model = load(tmp_path / "out", dtype=torch.float32)
    decoded = load(tmp_path / "source", dtype=torch.float32)
    tensors, names = tensors_of(tmp_path / "out"), dict(decoded.named_parameters())
    packed = sorted(
        name.removesuffix(".quant_map") for name in tensors if name.endswith(".quant_map")
    )
    assert len(packed) == 14
    for name in packed:
        state = QuantState.from_components(components(tensors, name))
        names[name].data = dequantize_4bit(tensors[name], state)
    ids = torch.arange(24)[None] * 7 % 96
    found, expected = (
        one.generate(ids, max_new_tokens=16, do_sample=False) for one in (model, decoded)
    )
    assert found.tolist() == expected.tolist()
    with torch.no_grad():
        assert float((model(ids).logits - decoded(ids).logits).abs().max()) < 1e-4
