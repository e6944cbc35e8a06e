"""transformers loads checkpoints with 4-bit experts, and computes with them what it computes with
decoded ones.
"""

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.8")
pytestmark = pytest.mark.oracle

from mixtures import MIXTURES, Packing, as_in_mixtral, build, pack, save, stacks_of  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import nf4conv.inference.moe  # noqa: E402, F401 - what is tested
from nf4conv.inference.moe.tensor import Experts4bit  # noqa: E402

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
IDS = torch.tensor([[5, 9, 77, 3, 21, 64], [8, 8, 30, 110, 4, 99]])


def packed_of(model) -> dict[str, Experts4bit]:
    named = model.named_parameters()
    return {name: weight for name, weight in named if isinstance(weight, Experts4bit)}


def can_choose(model) -> bool:
    """Returns whether an implementation can be chosen: Granite's in transformers 5.8 cannot."""
    return model._can_set_experts_implementation()


def compare(loaded, decoded, names):
    """Compares experts, logits and what is generated."""
    found = packed_of(loaded)
    assert sorted(found) == sorted(names)
    for name, weight in found.items():
        assert torch.equal(weight.decoded(), decoded.get_parameter(name)), name
    for implementation in IMPLEMENTATIONS if can_choose(loaded) else ("eager",):
        for model in (loaded, decoded) if can_choose(loaded) else ():
            model.set_experts_implementation(implementation)
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, decoded(IDS).logits), implementation
        generated = [
            model.generate(IDS, max_new_tokens=4, do_sample=False) for model in (loaded, decoded)
        ]
        assert torch.equal(*generated)


@pytest.mark.parametrize("layout", ["packed", "stacked"])
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("kind", MIXTURES)
def test_computes_as_with_decoded_experts(kind, layout, is_nested, tmp_path):
    model = build(kind)
    model.load_state_dict(save(model, kind, tmp_path, Packing(layout, is_nested)))
    compare(AutoModelForCausalLM.from_pretrained(tmp_path), model, stacks_of(model))


def test_gpt_oss_as_unsloth_names_it(tmp_path):
    model = build("gpt_oss")
    model.load_state_dict(save(model, "gpt_oss", tmp_path, Packing("unsloth")))
    compare(AutoModelForCausalLM.from_pretrained(tmp_path), model, stacks_of(model))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_layers_in_16_bits_beside_packed_ones(kind, tmp_path):
    model = build(kind)
    model.load_state_dict(save(model, kind, tmp_path, Packing(layers=(1,))))
    names = [name for name in stacks_of(model) if "layers.1." in name]
    compare(AutoModelForCausalLM.from_pretrained(tmp_path), model, names)


def test_routers_that_transformers_4_packed_are_decoded(tmp_path):
    """Its skip list is null, and everything but lm_head is packed; routers are no Linear here."""
    model = build("mixtral")
    decoded = save(model, "mixtral", tmp_path, Packing())
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".mlp.gate.weight")]:
        key = as_in_mixtral(name)
        packed, decoded[name] = pack(tensors.pop(name), is_nested=True)
        tensors |= {f"{key}.{suffix}" if suffix else key: each for suffix, each in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.load_state_dict(decoded)
    compare(AutoModelForCausalLM.from_pretrained(tmp_path), model, stacks_of(model))


def test_the_memory_footprint_counts_stored_bytes(tmp_path):
    model = build("qwen3_moe")
    save(model, "qwen3_moe", tmp_path, Packing())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    stored = sum(
        tensor.nbytes
        for each in packed_of(loaded).values()
        for tensor in each.weight.tensors().values()
    )
    others = sum(each.nbytes for each in loaded.parameters() if not isinstance(each, Experts4bit))
    footprint = loaded.get_memory_footprint(return_buffers=False)
    assert abs(footprint - stored - others) < 1
    assert loaded.num_parameters() >= sum(each.numel() for each in packed_of(loaded).values())


def test_what_a_forward_pass_decodes(tmp_path, monkeypatch):
    """One token decodes the experts that it is routed to, no other; in every implementation."""
    from nf4conv.inference.moe import weight

    model = build("qwen3_moe")
    save(model, "qwen3_moe", tmp_path, Packing())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    decode, counts = weight.decode, []

    def counted(part, ids, dtype):
        counts.append(ids.numel())
        return decode(part, ids, dtype)

    monkeypatch.setattr(weight, "decode", counted)
    for implementation in IMPLEMENTATIONS:
        counts.clear()
        loaded.set_experts_implementation(implementation)
        with torch.no_grad():
            loaded(IDS[:1, :1])
        assert sum(counts) == 2 * 2 * 3, implementation  # layers · top-k · projections


# ---------------------------------------------------------------------- as a parameter of a model


@pytest.fixture
def loaded(tmp_path: Path):
    model = build("qwen3_moe")
    save(model, "qwen3_moe", tmp_path, Packing())
    return AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_copy_is_independent(loaded):
    copied = copy.deepcopy(loaded)
    name, weight = next(iter(packed_of(copied).items()))
    before = loaded.get_parameter(name).decoded()
    weight.weight.parts[0].codes.zero_()
    assert torch.equal(loaded.get_parameter(name).decoded(), before)
    assert not torch.equal(weight.decoded(), before)


def test_another_dtype_keeps_the_codes(loaded):
    name, weight = next(iter(packed_of(loaded).items()))
    before = weight.decoded()
    torch.nn.Module.to(loaded, torch.bfloat16)
    converted = loaded.get_parameter(name)
    assert isinstance(converted, Experts4bit)
    assert converted.dtype == torch.bfloat16
    assert torch.equal(converted.decoded(), before.to(torch.bfloat16))
    with torch.no_grad():
        assert loaded(IDS).logits.dtype == torch.bfloat16


def test_flattens_for_torch_compile(loaded):
    for weight in packed_of(loaded).values():
        for shown in (weight, weight[torch.tensor([2, 0])], weight[1], weight.transpose(1, 2)):
            names, rest = shown.__tensor_flatten__()
            inner = {name: getattr(shown, name) for name in names}
            again = Experts4bit.__tensor_unflatten__(inner, rest, shown.shape, shown.stride())
            assert again.shape == shown.shape
            assert torch.equal(again.decoded(), shown.decoded())


def test_operations_that_it_does_not_know_decode(loaded):
    weight = next(iter(packed_of(loaded).values()))
    plain = weight.decoded()
    assert torch.equal(weight + 1, plain + 1)
    assert torch.equal(torch.einsum("eij->ji", weight), torch.einsum("eij->ji", plain))
    assert torch.equal(weight[1:3], plain[1:3])
    assert torch.equal(weight[-1], plain[-1])
    assert torch.equal(weight[torch.tensor([True, False, True, False])], plain[[0, 2]])
    assert torch.equal(weight.sum((1, 2)), plain.sum((1, 2)))
    assert (weight.mT.shape, weight.abs().max()) == (plain.mT.shape, plain.abs().max())


def test_saving_is_refused_in_a_line(loaded, tmp_path):
    with pytest.raises(ValueError, match="copy the folder that it was loaded from"):
        loaded.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_is_compiled_as_one_graph(implementation, loaded):
    loaded.set_experts_implementation(implementation)
    with torch.no_grad():
        expected = loaded(IDS).logits
        compiled = torch.compile(loaded, backend="aot_eager", fullgraph=True)
        # compiled code adds in another order
        torch.testing.assert_close(compiled(IDS).logits, expected, atol=1e-6, rtol=1e-5)
