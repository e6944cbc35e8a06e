"""Compiles models with packed experts: torch.compile takes their layers in, and goes around them
while gradients are recorded.
"""

import copy

import pytest
import torch
from adapters import INPUT
from expert_training import adapt, load_mixture, make_mixture, train

from nf4conv.errors import CodecError

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # of torch about compiling
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    return make_mixture("qwen3_moe", folder, num_hidden_layers=1)


def test_a_layer_computes_the_same(mixture):
    layer = load_mixture(mixture).eval().model.layers[0].mlp
    torch._dynamo.reset()
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        found = torch.compile(layer, backend="aot_eager")(x)
    assert torch.equal(found, expected)


def test_layers_compiled_one_by_one_share_their_code(tmp_path):
    """As accelerate compiles regions; torch gives up after 8 codes of one function."""
    model = load_mixture(make_mixture("qwen3_moe", tmp_path, num_hidden_layers=3)).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(INPUT, use_cache=False).logits
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = model(INPUT, use_cache=False).logits
    assert torch.equal(found, expected)


def test_compiled_code_finds_layers_that_moved(mixture):
    layer = load_mixture(mixture).eval().model.layers[0].mlp
    torch._dynamo.reset()
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        expected = compiled(x)
        kept = layer.experts._nf4conv_key
        layer.experts._nf4conv_key = kept.clone()  # as when it moves to another device
        assert torch.equal(compiled(x), expected)
        copied = torch.compile(copy.deepcopy(layer), backend="aot_eager")
        with pytest.raises(CodecError, match="load it again"):
            copied(x)


def test_a_whole_graph_is_refused_in_training_with_the_reason(mixture):
    layer = load_mixture(mixture).eval().model.layers[0].mlp
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="leave fullgraph off"):
        compiled(torch.zeros(2, 8, 64, dtype=torch.bfloat16))


@pytest.mark.architectures
def test_training_lora_on_attention(mixture):
    losses = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = adapt(load_mixture(mixture), target_parameters=None)
        if is_compiled:
            model = torch.compile(model, backend="aot_eager")
        losses.append(train(model)[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
