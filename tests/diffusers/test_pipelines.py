"""Tiny pipelines made and loaded by the installed diffusers: what it makes of our output, against
its own quantization.

Scales are quantized too, as by default; without a GPU bitsandbytes rounds a few of them differently
(docs/format.md).
"""

import pytest
import torch
from comparison import fold, output, own_quantization, packed, skip_modules
from tiny_pipelines import PIPELINES

import nf4conv

pytestmark = pytest.mark.architectures


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_a_pipeline_is_what_diffusers_makes_itself(make, tmp_path):
    torch.manual_seed(0)
    source, out = tmp_path / "source", tmp_path / "out"
    pipeline = make()
    pipeline.whole.to(torch.bfloat16).save_pretrained(source)
    nf4conv.quantize(source, out, device="cpu")
    absent = {name: None for name, part in pipeline.whole.components.items() if part is None}
    loaded = type(pipeline.whole).from_pretrained(out, torch_dtype=torch.bfloat16, **absent)
    for name, inputs in pipeline.inputs.items():
        hold_against_its_library(name, pipeline, loaded, source, out)
        assert output(getattr(loaded, name), inputs).isfinite().all()


def hold_against_its_library(name, pipeline, loaded, source, out):
    import diffusers
    import transformers

    kind = type(getattr(pipeline.whole, name))
    library = diffusers if kind.__module__.startswith("diffusers") else transformers
    ours = kind.from_pretrained(out / name, torch_dtype=torch.bfloat16)
    theirs = own_quantization(library, kind, source / name, skip_modules(out / name))
    modules, expected = packed(ours), packed(theirs)
    assert modules.keys() == expected.keys() == packed(getattr(loaded, name)).keys()
    alone = own_quantization(library, kind, source / name, None)
    assert fold(packed(alone).keys() - modules.keys()) == pipeline.kept.get(name, frozenset())
    for path, reference in expected.items():
        assert torch.equal(modules[path].weight.data, reference.weight.data), f"{name}: {path}"
    inputs = pipeline.inputs[name]
    one, other = output(ours, inputs), output(theirs, inputs)
    assert (one - other).abs().max() < 0.02 * other.abs().max(), name
