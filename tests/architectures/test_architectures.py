"""For every architecture: what we pack, transformers packs too, to the same bytes, and the model
says the same.

CI runs FAST; `make test-others` runs all.
"""

import json
import re
import shutil
import sys

import pytest
import torch
import transformers
from cases import EVERY, EXPERTS_ONE_BY_ONE, FAST, FORWARD_UNKNOWN, NOTHING_PACKED
from roundtrip import (
    UNKNOWN,
    UNREADABLE,
    ask_transformers,
    compare_modules,
    mistaken_modules,
    other_classes,
    packed_weights,
    quantize_both_ways,
    resemblance,
)
from tiny import first_output, save_tiny

import nf4conv
from nf4conv.choose.evidence import Why
from nf4conv.errors import PlanError
from nf4conv.models.config import levels

UNREAD = {"_load_in_4bit": True, "_load_in_8bit": False}
"""Keys that transformers writes into quantization_config, and no loader reads."""

ALL = [
    pytest.param(architecture, marks=() if architecture in FAST else pytest.mark.architectures)
    for architecture in EVERY
]

DELIBERATE = (
    Why.EXPERT,
    Why.FAMILY,
    Why.RENAMED_TOWER,
    Why.ROUTER,
    Why.TOWER,
    "an output head",
    "an input embedding",
    "fewer than 32 rows",
    "state-space kernels read this weight directly",
    "nn.MultiheadAttention reads this weight directly",
    "a loader could not tell its name from that of a skipped module",
    "not on disk under its own name",
)
"""Why we keep what transformers, left to itself, packs."""

ONE_CLASS = (
    "LiltModel",
    "MarkupLMModel",
    "PI0ForConditionalGeneration",
    "PocketTTSForConditionalGeneration",
    "T5GemmaEncoderModel",
)
"""Whose checkpoints load in 4 bits as what they are, but not as a model with another head, or with
none.
"""

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # of transformers about models made of random numbers
]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("architecture", ALL)
def test_our_checkpoint_is_the_model_that_transformers_quantizes_itself(architecture, tmp_path):
    both = quantize_both_ways(architecture, tmp_path)
    ours, theirs = packed_weights(both.ours), packed_weights(both.theirs)
    assert ours.keys() == theirs.keys()
    assert ours
    for path, (codes, absmax) in ours.items():
        assert torch.equal(codes, theirs[path][0]), path
        assert torch.equal(absmax, theirs[path][1]), path
    if architecture not in FORWARD_UNKNOWN:
        output = first_output(both.theirs)
        assert output.isfinite().all()
        assert torch.equal(first_output(both.ours), output)
        # both could be wrong alike: a packed weight that the model reads as the bytes it is
        assert resemblance(output, first_output(both.original)) > 0.8


@pytest.mark.parametrize("architecture", ALL)
def test_we_pack_what_transformers_packs_but_for_deliberate_differences(architecture, tmp_path):
    modules = compare_modules(architecture, save_tiny(architecture, tmp_path))
    assert modules.ours <= modules.linear
    unexplained = {
        path: reason
        for path, reason in modules.differences.items()
        if reason not in DELIBERATE and not reason.startswith("unsure")
    }
    assert unexplained == {}


@pytest.mark.parametrize("architecture", NOTHING_PACKED)
@pytest.mark.architectures
def test_a_model_without_anything_to_pack_is_refused(architecture, tmp_path):
    with pytest.raises(PlanError, match="no tensor of this checkpoint would be packed"):
        nf4conv.quantize(save_tiny(architecture, tmp_path), tmp_path / "out")


def test_llama_4_loads_with_its_experts_in_4_bit(tmp_path):
    source = save_tiny("Llama4ForCausalLM", tmp_path)
    nf4conv.quantize(source, tmp_path / "out")
    model = transformers.Llama4ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    original = transformers.Llama4ForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    experts = [path for path in packed_weights(model) if ".experts." in path]
    assert len(experts) == 2 * 4 * 3
    assert resemblance(first_output(model), first_output(original)) > 0.95


def test_our_config_is_what_transformers_reads_back(tmp_path):
    source = save_tiny("LlamaForCausalLM", tmp_path)
    nf4conv.quantize(source, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16
    )
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    # transformers adds two keys that no loader reads
    assert model.config.quantization_config.to_dict() == {**UNREAD, **written}


@pytest.mark.parametrize("architecture", ALL)
def test_the_skip_list_serves_the_model_without_its_head_and_with_another(architecture, tmp_path):
    source = save_tiny(architecture, tmp_path)
    others = () if architecture in ONE_CLASS else other_classes(architecture)
    mistaken = {other: mistaken_modules(source, other) for other in others}
    assert not any(mistaken.values()), mistaken


@pytest.mark.architectures
def test_transformers_4_loads_what_it_knows(python_with_transformers_4, tmp_path):
    for architecture in EVERY:
        source = save_tiny(architecture, tmp_path / architecture)
        nf4conv.quantize(
            source, tmp_path / architecture / "out", double_quant=False, moe="portable"
        )
    found = ask_transformers(python_with_transformers_4, "load", tmp_path)
    assert {
        name: result for name, result in found.items() if result not in ("ok", UNKNOWN, UNREADABLE)
    } == {}
    assert sum(result == "ok" for result in found.values()) >= 400


@pytest.mark.architectures
def test_what_transformers_4_saved_loads_in_both(python_with_transformers_4, tmp_path):
    saved = ask_transformers(python_with_transformers_4, "save", tmp_path, *EVERY)
    known = [name for name, result in saved.items() if result == "ok"]
    for architecture in known:
        folder = tmp_path / architecture
        options = {"double_quant": False, "moe": "portable"}
        nf4conv.quantize(folder / "source", folder / "out", **options)
    for python in (python_with_transformers_4, sys.executable):
        found = ask_transformers(python, "load", tmp_path, *known)
        assert {
            name: result for name, result in found.items() if result not in ("ok", UNREADABLE)
        } == {}
        assert sum(result == "ok" for result in found.values()) >= 400


@pytest.mark.architectures
def test_towers_load_when_they_are_packed_too(python_with_transformers_4, tmp_path):
    for architecture in EVERY:
        source = save_tiny(architecture, tmp_path / architecture)
        rows = nf4conv.plan_quantize(source).made.rows()
        if any(row.reason == Why.TOWER for row in rows):
            wanted = [row.name for row in rows if row.action == "pack" or row.reason == Why.TOWER]
            options = {"double_quant": False, "include": wanted, "moe": "portable"}
            nf4conv.quantize(source, tmp_path / architecture / "out", **options)
        else:
            shutil.rmtree(tmp_path / architecture)
    for python, fewest in ((sys.executable, 80), (python_with_transformers_4, 25)):
        found = ask_transformers(python, "load", tmp_path)
        assert {
            name: result
            for name, result in found.items()
            if result not in ("ok", UNKNOWN, UNREADABLE)
        } == {}
        assert sum(result == "ok" for result in found.values()) >= fewest


@pytest.mark.architectures
def test_transformers_4_loads_experts_that_are_packed_one_by_one(
    python_with_transformers_4, tmp_path
):
    saved = ask_transformers(python_with_transformers_4, "save", tmp_path, *EXPERTS_ONE_BY_ONE)
    assert saved == dict.fromkeys(EXPERTS_ONE_BY_ONE, "ok")
    for architecture in EXPERTS_ONE_BY_ONE:
        folder = tmp_path / architecture
        nf4conv.quantize(folder / "source", folder / "out", double_quant=False, moe="packed")
        header = (folder / "out" / "model.safetensors").read_bytes()[:200_000]
        assert re.search(rb"experts\.[0-3]\.\w+\.weight\.absmax", header)
    assert ask_transformers(python_with_transformers_4, "load", tmp_path) == saved


@pytest.mark.architectures
def test_transformers_4_loads_the_experts_of_llama_4(python_with_transformers_4, tmp_path):
    source = save_tiny("Llama4ForCausalLM", tmp_path / "Llama4ForCausalLM")
    nf4conv.quantize(source, tmp_path / "Llama4ForCausalLM" / "out")
    assert ask_transformers(python_with_transformers_4, "resemble", tmp_path) == {
        "Llama4ForCausalLM": "ok"
    }


@pytest.mark.architectures
def test_transformers_4_loads_the_mixtures_that_transformers_5_saved(
    python_with_transformers_4, tmp_path
):
    """Their configs name the experts and the rotary positions as 5 does."""
    unusable = (
        *FORWARD_UNKNOWN,
        "JambaForCausalLM",  # for which 4 wants kernels on a GPU
        "LongcatFlashForCausalLM",  # for whose experts without weights 5 saves weights
    )
    architectures = [name for name in EXPERTS_ONE_BY_ONE if name not in unusable]
    for architecture in architectures:
        folder = tmp_path / architecture
        source = save_tiny(architecture, folder)
        give_rotary_positions_another_base(source)
        nf4conv.quantize(source, folder / "out", moe="packed")
        nf4conv.dequantize(folder / "out", tmp_path / "plain")
        model_class = getattr(transformers, architecture)
        plain = model_class.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
        torch.save(first_output(plain.eval()), folder / "expected.pt")
        shutil.rmtree(tmp_path / "plain")
    found = ask_transformers(python_with_transformers_4, "expect", tmp_path, *architectures)
    assert found == dict.fromkeys(architectures, "ok")


def give_rotary_positions_another_base(source):
    """A base at which a model that takes the default says something else."""
    path = source / "config.json"
    config = json.loads(path.read_text())
    for _, level in levels(config):
        if "rope_theta" in level:
            level["rope_theta"] = 70.0
    path.write_text(json.dumps(config))
