"""Writes docs/diffusers.md: every class of denoiser, with what was found.

python tests/diffusers/denoiser_table.py > docs/diffusers.md
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import bitsandbytes
import diffusers
import pytest
import torch
from comparison import ask_for_no_gpu, output, quantize_both_ways, unequal
from every_class import Plan, classes, plan
from tiny_denoisers import DENOISERS
from tiny_pipelines import PIPELINES

INTRODUCTION = """# Denoisers of diffusers

What nf4conv makes of the classes of diffusers {diffusers} that denoise, or steer what does. `make test-diffusers` fails
on any difference that is not listed.

- **packed**: linear layers that are packed, of all, in the class at the size it has by default.
- **loads**: a small random one, quantized by nf4conv, loads in diffusers; its packed weights and scales are, byte for
  byte, those of the model that diffusers quantizes itself with the same skip list (bitsandbytes {bitsandbytes}, CPU),
  and so is its output. "planned": only the plan was held against the layers that diffusers would make 4-bit; they are
  the same.
- **kept on purpose**: what diffusers, left alone, packs and nf4conv does not, and why.

Whole pipelines, with their text encoders, are made, quantized and loaded, too: {pipelines}.

"""

CLOSING = """
## What else is decided

- Layers that diffusers keeps in float32 (`_keep_in_fp32_modules`, such as the modulation of Kandinsky 5) it does not
  pack either, and they do not count as kept on purpose. What is stored in float32 of them, `--dtype` does not cast.
- `proj_out` outside the blocks is packed where blocks have layers of that name, as in Flux: diffusers looks for the
  last component of a name in the skip list, which would skip those too. The `norm_out` of HunyuanVideo's refiner stays
  in 16 bits for a like reason.
- Experts that are layers of their own (HiDream) are packed, which those of language models are not: diffusers loads
  them. Experts stacked in one tensor (Nucleus) stay in 16 bits, as in diffusers.
- Weights whose dtype diffusers reads, to cast what goes into their layer (the time embedders of Z-Image, Bria Fibo 2
  and Wan), are all outside the blocks.
- A class that is not listed follows the same rules. If it keeps layers of its blocks in float32, it does not load until
  they are named with `--skip-modules`.
"""


def loading() -> dict[str, str]:
    """Class → whether all of its tiny denoisers are what diffusers makes itself."""
    found: dict[str, str] = {}
    for name, make in DENOISERS.items():
        torch.manual_seed(0)
        denoiser = make()
        with tempfile.TemporaryDirectory(prefix=name) as folder:
            both = quantize_both_ways(denoiser, Path(folder))
            same = not unequal(both.ours, both.theirs) and torch.equal(
                output(both.ours, denoiser.inputs), output(both.theirs, denoiser.inputs)
            )
        if found.get(denoiser.name) != "**no**":
            found[denoiser.name] = "yes" if same else "**no**"
    return found


def row(name: str, found: Plan, loads: str) -> str:
    counts = Counter(found.reasons.values())
    kept = "; ".join(f"{count} × {reason}" for reason, count in sorted(counts.items()))
    return f"| {name} | {len(found.packed)} / {len(found.linear)} | {loads} | {kept} |\n"


def main() -> None:
    with pytest.MonkeyPatch.context() as patched:
        ask_for_no_gpu(patched)
        loads = loading()
    pipelines = sorted(type(make().whole).__name__ for make in PIPELINES.values())
    versions = {"diffusers": diffusers.__version__, "bitsandbytes": bitsandbytes.__version__}
    sys.stdout.write(INTRODUCTION.format(**versions, pipelines=", ".join(pipelines)))
    sys.stdout.write("| denoiser | packed | loads | kept on purpose |\n|---|---|---|---|\n")
    plans = {kind.__name__: plan(kind) for kind in classes()}
    for name in sorted(plans, key=lambda name: (name not in loads, name)):
        found = plans[name]
        planned = "planned" if found.packed == found.replaced else "**no**"
        sys.stdout.write(row(name, found, loads.get(name, planned)))
    sys.stdout.write(CLOSING)


if __name__ == "__main__":
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    main()
