"""patch_linear_4bit: which layers, in which order, what torch.compile makes of them, and the way
back.
"""

import copy
import pickle

import pytest
import torch

import nf4conv
from nf4conv.inference import patching

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # of torch about compiling
]

bitsandbytes = pytest.importorskip("bitsandbytes")


def packed_model(bias: bool = False, **options: object) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = [
        bitsandbytes.nn.Linear4bit(
            128, 128, bias=bias, compute_dtype=torch.float32, quant_type="nf4", **options
        )
        for _ in range(2)
    ]
    return torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1]).to("cpu")


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("trains", [False, True], ids=["", "trains"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_compiles_as_one_graph(dynamic: bool, trains: bool, bias: bool) -> None:
    model = packed_model(bias)
    nf4conv.patch_linear_4bit(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 128, requires_grad=trains)
        again = x.detach().clone().requires_grad_(trains)
        expected, found = model(x), compiled(again)
        assert torch.equal(found, expected)
        if trains:
            expected.square().sum().backward()
            found.square().sum().backward()
            torch.testing.assert_close(again.grad, x.grad)


@pytest.mark.skipif(
    not bitsandbytes.functional.has_avx512bf16(), reason="bitsandbytes packs nothing anew here"
)
def test_layers_that_have_run_on_a_cpu_stay_with_bitsandbytes(monkeypatch) -> None:
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    model = packed_model().eval()
    x = torch.randn(2, 128)
    with torch.no_grad():
        expected = model(x)
        assert model[0].weight.quant_state.packing_format_for_cpu
        nf4conv.patch_linear_4bit(model)
        assert torch.equal(model(x), expected)


def test_a_compiled_graph_sees_new_codes_and_scales() -> None:
    model = packed_model()
    nf4conv.patch_linear_4bit(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 128)
    first = compiled(x)
    other = packed_model()
    for layer in other:
        if hasattr(layer, "weight"):
            layer.weight.quant_state.absmax.mul_(2)
    model[0].weight, model[2].weight = other[0].weight, other[2].weight
    second = compiled(x)
    assert torch.equal(second, model(x))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("first", ["adapters", "patch"])
def test_with_adapters_in_either_order(first: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False)
    x = torch.randn(4, 128)
    plain, model = packed_model(), packed_model()
    torch.manual_seed(5)
    expected = peft.get_peft_model(plain, config)(x)
    if first == "patch":
        assert nf4conv.patch_linear_4bit(model) == 2
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, config)
    if first == "adapters":
        assert nf4conv.patch_linear_4bit(adapted) == 2
    found = adapted(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    gradients = [p.grad for name, p in adapted.named_parameters() if "lora_B" in name]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    base = adapted.unload()
    assert nf4conv.unpatch_linear_4bit(base) == 2


def test_unpatched_layers_are_as_before() -> None:
    model = packed_model()
    before = dict(vars(model[0]))
    assert nf4conv.patch_linear_4bit(model) == 2
    assert nf4conv.patch_linear_4bit(model) == 2
    assert nf4conv.unpatch_linear_4bit(model) == 2
    assert vars(model[0]) == before
    assert nf4conv.unpatch_linear_4bit(model) == 0


def test_a_copy_uses_its_own_weight() -> None:
    model = packed_model()
    nf4conv.patch_linear_4bit(model)
    copied = copy.deepcopy(model)
    copied[0].weight.quant_state.absmax.fill_(7)
    x = torch.randn(2, 128)
    assert not torch.equal(copied[0](x), model[0](x))


def test_a_patched_model_can_be_stored() -> None:
    model = packed_model(bias=True)
    expected_keys = set(model.state_dict())
    nf4conv.patch_linear_4bit(model)
    assert set(model.state_dict()) == expected_keys
    read = pickle.loads(pickle.dumps(model))  # noqa: S301 - our own
    x = torch.randn(2, 128)
    assert torch.equal(read(x), model(x))
    read[0].weight.quant_state.absmax.fill_(7)
    assert not torch.equal(read[0](x), model[0](x))
    assert nf4conv.unpatch_linear_4bit(read) == 2


def test_a_patched_model_moves() -> None:
    model = packed_model(bias=True)
    nf4conv.patch_linear_4bit(model)
    x = torch.randn(2, 128)
    expected = model(x)
    assert torch.equal(model.to("cpu")(x), expected)
    assert model.bfloat16()(x).dtype == x.dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model[0](x).dtype == x.dtype


class Doubled(bitsandbytes.nn.Linear4bit):
    """A layer that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_class_with_a_forward_of_its_own_keeps_it() -> None:
    layer = Doubled(128, 128, compute_dtype=torch.float32, quant_type="nf4")
    model = torch.nn.Sequential(layer).to("cpu")
    x = torch.randn(2, 128, requires_grad=True)
    expected = model(x)
    assert nf4conv.patch_linear_4bit(model) == 0
    assert torch.equal(model(x), expected)
    assert nf4conv.unpatch_linear_4bit(model) == 0


def test_hooks_of_accelerate_stay() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubled(hooks.ModelHook):
        def post_forward(self, _: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
            return 2 * output

    model = packed_model()
    x = torch.randn(2, 128)
    plain = model[0](x)
    hooks.add_hook_to_module(model[0], Doubled())
    nf4conv.patch_linear_4bit(model)
    assert patching._is_ours(model[0]._old_forward)
    torch.testing.assert_close(model[0](x), 2 * plain)
    nf4conv.unpatch_linear_4bit(model)
    torch.testing.assert_close(model[0](x), 2 * plain)
