"""Models with patched layers on a GPU: under each mode of torch.compile, in CUDA graphs captured by
hand, in training; and what the first call of a process may be.
"""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import nf4conv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # of torch about compiling
]

MODES = ("default", "reduce-overhead", "max-autotune")
ROWS = (1, 12, 40, 100)


def packed_model(
    bias: bool = False, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> torch.nn.Sequential:
    """Three layers of bitsandbytes, patched."""
    modules = pytest.importorskip("bitsandbytes.nn")
    torch.manual_seed(7)
    layers = [
        modules.Linear4bit(512, 512, bias=bias, compute_dtype=dtype, quant_type="nf4")
        for _ in range(3)
    ]
    model = torch.nn.Sequential(
        layers[0], torch.nn.SiLU(), layers[1], torch.nn.SiLU(), layers[2]
    ).to(device)
    nf4conv.patch_linear_4bit(model)
    return model


def inputs(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(rows)
    return torch.randn(rows, 512, device="cuda", generator=generator).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the roundings between layers, which a compiler may leave out."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error.item() < 1e-2


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mode", MODES)
def test_compiled_before_any_eager_call(mode: str, rows: int) -> None:
    torch._dynamo.reset()
    model = packed_model(bias=rows == 12)
    x = inputs(rows)
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    with torch.no_grad():
        for _ in range(4):  # warms up, records, replays
            found = compiled(x).clone()
        assert_near(found, model(x))


def test_two_models_and_changing_rows() -> None:
    torch._dynamo.reset()
    models = [packed_model(), packed_model(bias=True)]
    compiled = [torch.compile(model, mode="reduce-overhead", fullgraph=True) for model in models]
    with torch.no_grad():
        for rows in (1, 16, 1, 70, 16):
            for one, other in zip(compiled, models, strict=True):
                x = inputs(rows)
                for _ in range(3):
                    found = one(x).clone()
                assert_near(found, other(x))


def test_dynamic_rows_make_one_graph() -> None:
    torch._dynamo.reset()
    model = packed_model()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 20, 50, 130):
            assert_near(compiled(inputs(rows)), model(inputs(rows)))


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("rows", [12, 100])
def test_training(rows: int, mode: str) -> None:
    torch._dynamo.reset()
    model = packed_model(bias=True)
    model[0].bias.requires_grad_()
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    expected_x = inputs(rows).requires_grad_()
    model(expected_x).float().square().mean().backward()
    expected_bias = model[0].bias.grad.clone()
    for _ in range(3):
        model[0].bias.grad = None
        x = inputs(rows).requires_grad_()
        compiled(x).float().square().mean().backward()
    assert_near(x.grad, expected_x.grad)
    assert_near(model[0].bias.grad, expected_bias)


FIRST_CALL = """
import torch, bitsandbytes, nf4conv
layer = bitsandbytes.nn.Linear4bit(512, 256, bias=False, compute_dtype=torch.bfloat16).cuda()
nf4conv.patch_linear_4bit(layer)
x = torch.randn(ROWS, 512, device="cuda").bfloat16()
x @ torch.randn(512, 8, device="cuda").bfloat16()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    out = layer(x)
for _ in range(3):
    out.zero_()
    graph.replay()
torch.cuda.synchronize()
with torch.no_grad():
    expected = layer(x)
assert torch.equal(out, expected), (out - expected).abs().max()
assert out.abs().sum() > 0
"""


@pytest.mark.parametrize("rows", ROWS)
def test_a_graph_is_captured_before_anything_has_run(rows: int) -> None:
    """In a process of its own, in which no table exists and no kernel is loaded."""
    source = FIRST_CALL.replace("ROWS", str(rows))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("mode", MODES[:2])
def test_generate_with_a_static_cache(mode: str) -> None:
    """transformers itself compiles the step that makes a token.

    A model whose `forward` is compiled with "reduce-overhead" before fails: the first pass makes
    the cache in a CUDA graph, whose memory the next pass overwrites.
    """
    transformers = pytest.importorskip("transformers")
    modules = pytest.importorskip("bitsandbytes.nn")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(
        3
    )  # its ten best tokens are all ahead of the next by a tenth of the deviation
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(part, name, _packed(modules, linear))
    model.cuda()
    assert nf4conv.patch_linear_4bit(model) == 14
    prompt = torch.arange(5, device="cuda")[None]
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    compile_config = transformers.CompileConfig(mode=mode, fullgraph=True)
    found = model.generate(
        prompt, cache_implementation="static", compile_config=compile_config, **options
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    same = (found == expected).float().mean().item()
    assert same > 0.5  # a compiled model rounds elsewhere, and one token changes all that follow
    assert torch.equal(found[:, :8], expected[:, :8])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mode", [None, *MODES[:2]])
def test_models_on_two_devices_in_turns(mode: str | None, rows: int) -> None:
    """torch's current device stays the first; graphs are captured where their model is."""
    torch._dynamo.reset()
    models = [packed_model(bias=True, device=f"cuda:{place}") for place in range(2)]
    own = [inputs(rows).to(f"cuda:{place}") for place in range(2)]
    with torch.no_grad():
        expected = models[0](own[0])
        calls: list[Callable[..., torch.Tensor]] = list(models)
        if mode is not None:
            calls = [torch.compile(model, mode=mode, fullgraph=True) for model in models]
        for _ in range(4):
            for place, call in enumerate(calls):
                found = call(own[place]).clone()
                assert found.device.index == place
                assert_near(found.to("cuda:0"), expected)
    gradients = []
    for model, x in zip(models, own, strict=True):
        x.requires_grad_()
        model(x).float().square().mean().backward()
        gradients.append(x.grad.to("cuda:0"))
    assert torch.equal(*gradients)


def _packed(modules: object, linear: torch.nn.Linear) -> torch.nn.Module:
    make: Callable[..., torch.nn.Module] = modules.Linear4bit
    layer = make(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
        quant_type="nf4",
    )  # fmt: skip
    layer.weight = modules.Params4bit(
        linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    return layer
