"""Packed experts on a GPU: products against float64, decoding against bitsandbytes, and whole
layers in transformers.
"""

from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from torch.nn import functional

import nf4conv
from nf4conv.inference.experts.packed import PackedExperts, decode, split_stack, stack_experts
from nf4conv.inference.experts.product import (
    decode_experts,
    group_by_expert,
    multiply_groups,
    multiply_rows,
)
from nf4conv.inference.experts.projection import project, suits_kernels

pytestmark = pytest.mark.gpu

SHAPES = ((8, 2, 128, 64), (16, 4, 2880, 320), (32, 8, 2048, 768))  # experts, top k, hidden, inner


def packed(
    experts: int, rows: int, columns: int, layout: str, nested: bool = True, kind: str = "nf4"
) -> PackedExperts:
    weights = torch.randn(experts, rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
    if layout == "stacked":
        return split_stack(*nf4conv.quantize_4bit(weights, kind, 64, nested))
    made = [nf4conv.quantize_4bit(matrix, kind, 64, nested) for matrix in weights]
    return stack_experts([codes for codes, _ in made], [state for _, state in made])


def choose(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(top_k, 1).indices.contiguous()


def products(x: torch.Tensor, ids: torch.Tensor, stack: PackedExperts) -> torch.Tensor:
    """Multiplies one row of x for each pair, in float64."""
    every = torch.arange(stack.experts, device="cuda")
    weights = decode(stack, every, torch.float32).double()
    rows = zip(ids.view(-1).tolist(), x.double(), strict=True)
    return torch.stack([weights[expert] @ row for expert, row in rows])


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["packed", "stacked"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 20, 100])
def test_a_layer(tokens: int, shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    experts, top_k, hidden, inner = shape
    gate, up = (packed(experts, inner, hidden, layout) for _ in range(2))
    down = packed(experts, hidden, inner, layout)
    assert suits_kernels(gate)
    assert suits_kernels(down)
    x = torch.randn(tokens, hidden, device="cuda").to(dtype)
    ids = choose(tokens, top_k, experts)
    weights = torch.rand(tokens, top_k, device="cuda")
    spread = x.repeat_interleave(top_k, 0)
    exact = functional.silu(products(spread, ids, gate)) * products(spread, ids, up)
    there = project(gate, up, silu=True)
    by_rows = multiply_rows(x, ids, there)
    pairs, own = group_by_expert(ids, experts, 16)
    by_groups = multiply_groups(x, pairs, own, top_k, ids.numel(), there)
    assert error(by_rows, exact) < 5e-3
    assert error(by_groups, exact) < 5e-3
    each = products(by_rows, ids, down).view(tokens, top_k, hidden)
    exact = (each * weights[:, :, None].double()).sum(1)
    back = project(down)
    assert error(multiply_rows(by_rows, ids, back, weights), exact) < 5e-3
    results = multiply_groups(by_rows, pairs, own, 1, ids.numel(), back, weights.view(-1))
    assert error(results.view(tokens, top_k, hidden).sum(1), exact) < 5e-3


def test_nothing_outlives_a_call_in_a_graph() -> None:
    gate, up = (packed(8, 64, 128, "packed") for _ in range(2))
    there = project(gate, up, rows=64, silu=True)
    x = torch.randn(2, 128, device="cuda", dtype=torch.bfloat16)
    ids = choose(2, 2, 8)
    expected = multiply_rows(x, ids, there)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multiply_rows(x, ids, there)
    graph.replay()
    assert torch.equal(out, expected)
    del out, graph
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decodes_as_bitsandbytes(dtype: torch.dtype, nested: bool, kind: str) -> None:
    weights = torch.randn(4, 96, 320, device="cuda")
    made = [bnb.quantize_4bit(matrix, quant_type=kind, compress_statistics=nested, blocksize=64)
            for matrix in weights]  # fmt: skip
    stack = stack_experts([codes for codes, _ in made], [state for _, state in made])
    states = [(codes, state) for codes, state in made]
    for _, state in states:
        state.dtype = dtype
    expected = torch.stack([bnb.dequantize_4bit(codes, state) for codes, state in states])
    ids = torch.tensor([3, 1, 1], device="cuda")
    assert torch.equal(decode_experts((stack,), ids, dtype, by_ends=False), expected[ids])
    ends = torch.tensor([2, 2, 2, 9], dtype=torch.int32, device="cuda")
    used = torch.tensor([0, 3], device="cuda")
    assert torch.equal(decode_experts((stack,), ends, dtype, by_ends=True)[used], expected[used])


def write_mixture(kind: str, folder: Path, layers: int = 2) -> Path:
    """Returns a tiny mixture that nf4conv packed."""
    transformers = pytest.importorskip("transformers", minversion="5.8")
    options = {
        "vocab_size": 128, "hidden_size": 128, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
        "num_experts_per_tok": 2, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "gpt_oss":
        options |= {"intermediate_size": 128, "num_local_experts": 4}
    else:
        options |= {"moe_intermediate_size": 64, "num_experts": 8, "intermediate_size": 128}
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "experts" in name or "router" in name or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "source")
    packing = {"moe": "packed"}
    nf4conv.quantize(folder / "source", folder / "packed", **packing)
    return folder / "packed"


KINDS = ("qwen3_moe", "gpt_oss")


@pytest.fixture(scope="module", params=KINDS)
def mixture(request, tmp_path_factory) -> Path:
    return write_mixture(request.param, tmp_path_factory.mktemp(request.param))


MARGIN = 0.1
"""Between the scores of the last expert that is chosen and the first that is not, in standard
deviations of scores. Rounding to bfloat16 moves a score by a hundredth of one.
"""


@torch.no_grad()
def clear_tokens(model: torch.nn.Module) -> torch.Tensor:
    """Returns the tokens whose experts no rounding decides, in any layer: [n].

    Each is a sequence of its own, so that none depends on how another was routed.
    """
    margins = []

    def look(router: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        x = arguments[0].reshape(-1, router.weight.shape[1])
        scores = functional.linear(x, router.weight, getattr(router, "bias", None)).float()
        best = scores.topk(3, 1).values
        margins.append((best[:, 1] - best[:, 2]) / scores.std())

    routers = [part for name, part in model.named_modules() if name.endswith(("gate", "router"))]
    hooks = [router.register_forward_pre_hook(look) for router in routers]
    tokens = torch.arange(3, 128, device="cuda")
    model(tokens[:, None])
    for hook in hooks:
        hook.remove()
    assert len(margins) == 2
    return tokens[torch.stack(margins).amin(0) > MARGIN]


def test_layers_in_transformers(mixture: Path, monkeypatch) -> None:
    import nf4conv.inference.moe
    from nf4conv.inference.moe import forward

    assert nf4conv.inference.moe
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        mixture, device_map={"": 0}, dtype=torch.bfloat16
    ).eval()
    clear = clear_tokens(model)
    compiled = torch.compile(model)
    for tokens in (1, 9, 60):
        ids = clear[:tokens, None]
        assert len(ids) == tokens
        with torch.no_grad():
            found = model(ids).logits
            traced = compiled(ids).logits
            with monkeypatch.context() as patch:
                patch.setattr(forward, "packed_experts_forward", lambda *_: None)
                expected = model(ids).logits
        for logits in (found, traced):
            assert torch.cosine_similarity(logits.float(), expected.float(), dim=2).min() > 0.999


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")
def test_a_model_that_is_spread_over_two_devices(kind: str, tmp_path: Path) -> None:
    """As device_map="auto" spreads it, where one device is too small."""
    import nf4conv.inference.moe

    assert nf4conv.inference.moe
    from transformers import AutoModelForCausalLM

    folder = write_mixture(kind, tmp_path, layers=8)
    options = {"dtype": torch.bfloat16}
    alone = AutoModelForCausalLM.from_pretrained(folder, device_map={"": 0}, **options).eval()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    spread = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={0: size // 2, 1: "4GB"}, **options
    ).eval()
    layers = {name: place for name, place in spread.hf_device_map.items() if "layers." in name}
    assert set(layers.values()) == {0, 1}, spread.hf_device_map
    ids = torch.randint(3, 128, (2, 20), device="cuda:0")
    for patch in (lambda _: None, nf4conv.patch_linear_4bit):
        patch(alone)
        patch(spread)
        for rows in (ids[:1, :1], ids):
            with torch.no_grad():
                expected = alone(rows).logits
                found = spread(rows).logits
            assert torch.equal(found.to(expected.device), expected)
        words = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(spread.generate(ids, **words), alone.generate(ids, **words))
