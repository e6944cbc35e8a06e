"""transformers loads checkpoints with 4-bit experts, and computes with them what it computes with
decoded ones.
"""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from packaging.version import Version

transformers = pytest.importorskip("transformers", minversion="5.8")
pytestmark = pytest.mark.oracle

from checkpoints import tensors_of  # noqa: E402
from packed_experts import (  # noqa: E402
    CLASSES,
    encode,
    load,
    loaded_and_decoded,
    make_mixture,
    pack_as_unsloth_does_gpt_oss,
    pack_one_by_one,
    pack_stacked,
    save,
    stacks_of,
)
from transformers import AutoModelForCausalLM  # noqa: E402

import nf4conv.inference.moe  # noqa: E402, F401 - what is tested
from nf4conv.inference.moe import forward  # noqa: E402
from nf4conv.inference.moe.tensor import Experts4bit  # noqa: E402

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
WITHOUT_GRANITE = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.13"),
    reason="Granite's modules take no packed experts before transformers 5.13: test_moe_refused.py",
)
IDS = torch.tensor([[5, 9, 77, 3, 21, 64], [8, 8, 30, 90, 4, 79]])


def packed_of(model) -> dict[str, Experts4bit]:
    named = model.named_parameters()
    return {name: weight for name, weight in named if isinstance(weight, Experts4bit)}


def compare(loaded, decoded, names):
    """Compares experts, logits and what is generated."""
    found = packed_of(loaded)
    assert sorted(found) == sorted(names)
    for name, weight in found.items():
        assert torch.equal(weight.decoded(), decoded.get_parameter(name)), name
    for implementation in IMPLEMENTATIONS:
        for model in (loaded, decoded):
            model.set_experts_implementation(implementation)
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, decoded(IDS).logits), implementation
        generated = [
            model.generate(IDS, max_new_tokens=4, do_sample=False) for model in (loaded, decoded)
        ]
        assert torch.equal(*generated)


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {kind: make_mixture(kind, folder / kind) for kind in CLASSES if kind != "mistral4"}


def pack_stacks(source: Path, folder: Path, **options: bool) -> dict[str, torch.Tensor]:
    """Packs the stacks that the model computes with, by the names that they have there."""
    return pack_stacked(source, folder, load(source).state_dict(), **options)


@pytest.mark.parametrize("layout", ["packed", "stacked"])
@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"),
        pytest.param("granitemoe", marks=WITHOUT_GRANITE),
    ],
)
def test_computes_as_with_decoded_experts(sources, kind, layout, is_nested, tmp_path):
    pack = partial(pack_one_by_one, kind) if layout == "packed" else pack_stacks
    pack = partial(pack, compress_statistics=is_nested)
    loaded, decoded = loaded_and_decoded(sources[kind], tmp_path, pack)
    compare(loaded, decoded, stacks_of(decoded))


def test_gpt_oss_as_unsloth_names_it(sources, tmp_path):
    made = loaded_and_decoded(sources["gpt_oss"], tmp_path, pack_as_unsloth_does_gpt_oss)
    compare(*made, stacks_of(made[1]))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_layers_in_16_bits_beside_packed_ones(sources, kind, tmp_path):
    pack = partial(pack_one_by_one, kind, only="layers.1.")
    loaded, decoded = loaded_and_decoded(sources[kind], tmp_path, pack)
    compare(loaded, decoded, [name for name in stacks_of(decoded) if "layers.1." in name])


def test_routers_that_transformers_4_packed_are_decoded(sources, tmp_path):
    """Its skip list is null, and everything but lm_head is packed; routers are no Linear here."""

    def pack_with_routers(source: Path, folder: Path) -> dict[str, torch.Tensor]:
        expected = pack_one_by_one("mixtral", source, folder)
        tensors = tensors_of(folder)
        for name in [name for name in expected if name.endswith(".gate.weight")]:
            expected[name] = encode(tensors, name, tensors[name])
        save(source, folder, tensors)
        return expected

    loaded, decoded = loaded_and_decoded(sources["mixtral"], tmp_path, pack_with_routers)
    compare(loaded, decoded, stacks_of(decoded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_all_layers_compute_in_the_dtype_that_was_asked_for(sources, kind, dtype, tmp_path):
    """The files are in bfloat16. transformers leaves weights in that of the files, and of some
    routers it wants float32.
    """
    pack = partial(pack_one_by_one, kind, only="layers.1.")
    loaded_and_decoded(sources[kind], tmp_path, pack)
    loader = partial(AutoModelForCausalLM.from_pretrained, dtype=dtype)
    loaded, decoded = loader(tmp_path / "packed"), loader(tmp_path / "decoded")
    for name, weight in decoded.named_parameters():
        assert loaded.get_parameter(name).dtype == weight.dtype, name
    for name, weight in packed_of(loaded).items():  # exact, where the other came by bfloat16
        decoded.get_parameter(name).data = weight.decoded()
    compare(loaded, decoded, [name for name in stacks_of(decoded) if "layers.1." in name])


@pytest.fixture
def loaded(sources, tmp_path):
    """A packed mixture that computes in float32."""
    pack = partial(pack_one_by_one, "qwen3_moe")
    model, _ = loaded_and_decoded(sources["qwen3_moe"], tmp_path, pack)
    return torch.nn.Module.to(model, torch.float32)


def test_the_memory_footprint_counts_stored_bytes(loaded):
    stored = sum(
        tensor.nbytes
        for each in packed_of(loaded).values()
        for part in each.weight.parts
        for tensor in part.tensors().values()
    )
    others = sum(each.nbytes for each in loaded.parameters() if not isinstance(each, Experts4bit))
    footprint = loaded.get_memory_footprint(return_buffers=False)
    assert abs(footprint - stored - others) < 1
    assert loaded.num_parameters() >= sum(each.numel() for each in packed_of(loaded).values())


def test_what_a_forward_pass_decodes(loaded, monkeypatch):
    """One token decodes the experts that it is routed to, no other; in every implementation."""
    from nf4conv.inference.moe import weight

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


def test_a_layer_is_asked_for_kernels_first(loaded, monkeypatch):
    """Once in a pass, whichever implementation was chosen."""
    asked = []
    monkeypatch.setattr(forward, "packed_experts_forward", lambda *given: asked.append(len(given)))
    for implementation in IMPLEMENTATIONS:
        loaded.set_experts_implementation(implementation)
        for has_gradients in (False, True):
            with torch.set_grad_enabled(has_gradients):
                loaded(IDS)
            assert asked == [4, 4]
            asked.clear()


# ---------------------------------------------------------------------- as a parameter of a model


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
