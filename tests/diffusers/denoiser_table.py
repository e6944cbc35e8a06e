"""Prints table.md: every class of denoiser, with what was found.

python tests/diffusers/denoiser_table.py > tests/diffusers/table.md
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

This page shows what nf4conv does with the classes of diffusers {diffusers} that denoise, or that
steer a denoiser. `make test-others` fails on any difference that is not listed here.

- **packed**: the number of linear layers that nf4conv packs, and the number of all linear layers,
  in the class at its default size.
- **loads**: "yes" means that diffusers loads a small random model that nf4conv quantized. Its
  packed weights and scales are, byte for byte, those of the model that diffusers itself quantizes
  with the same skip list (bitsandbytes {bitsandbytes}, CPU), and the model gives the same output.
  "planned": a test compared only the plan with the layers that diffusers would make 4-bit, and they
  are the same.
- **kept on purpose**: the layers that diffusers packs by default and nf4conv does not, and why.

The tests also make, quantize and load whole pipelines, with their text encoders:

{pipelines}
"""

CLOSING = """
## Other rules

- nf4conv does not pack layers that diffusers keeps in float32 (`_keep_in_fp32_modules`, such as the
  modulation of Kandinsky 5). diffusers does not pack them either, so they do not count as kept on
  purpose. `--dtype` does not cast those of them that are stored in float32.
- nf4conv packs `proj_out` outside the blocks if the blocks have layers of that name, as in Flux.
  diffusers looks for the last part of a name in the skip list, and would also skip the layers in
  the blocks. The `norm_out` of HunyuanVideo's refiner stays in 16 bits for a similar reason.
- nf4conv packs experts that are layers of their own (HiDream), because diffusers loads them. It
  does not pack such experts in language models. Experts that are stacked in one tensor (Nucleus)
  stay in 16 bits, as in diffusers.
- diffusers reads the dtype of some weights to cast the input of their layer (the time embedders of
  Z-Image, Bria Fibo 2 and Wan). All of these are outside the blocks.
- A class that is not listed follows the same rules. If it keeps layers of its blocks in float32, it
  does not load until you keep them with `--exclude`.
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
    listed = "".join(f"- {name}\n" for name in pipelines)
    sys.stdout.write(INTRODUCTION.format(**versions, pipelines=listed))
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
