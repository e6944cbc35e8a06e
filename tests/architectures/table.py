"""Writes the table of docs/architectures.md: every architecture of the sweep, with what was found.

python tests/architectures/table.py PYTHON_WITH_TRANSFORMERS_4 > docs/architectures.md
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import bitsandbytes
import torch
import transformers
from cases import CASES, FORWARD_UNKNOWN
from roundtrip import (
    UNKNOWN,
    UNREADABLE,
    ask_transformers,
    compare_modules,
    first_output,
    packed_weights,
    quantize_both_ways,
)
from test_architectures import DELIBERATE

INTRODUCTION = """# Architectures

For each of these architectures a small random checkpoint is made with transformers {transformers}, quantized by
nf4conv, and loaded. `make test-architectures` does so and fails on any difference that is not listed; CI does so for
some of them.

- **packed**: linear layers that are packed, of all that transformers could pack.
- **5**: it loads in transformers {transformers}; its packed weights are, byte for byte, those of the model that
  transformers quantizes itself with the same skip list (bitsandbytes {bitsandbytes}, CPU), and so is the model's
  output. "bytes": the sweep has no inputs for the model, and the weights alone were compared.
- **4**: the same in transformers 4.57.6. A dash: it does not know the architecture. "cannot read": it cannot read what
  transformers 5 saves for this architecture, which says nothing of checkpoints that transformers 4 has saved.
- **kept on purpose**: what transformers, left to its own list, packs and nf4conv does not, and why.

"""


CLOSING = """## Known gaps

transformers 5 loads a few architectures under names that the rules do not foresee: Gradium Phonon TTS, NeMo SpeechLM,
TIPSv2 DPT and the SAM 3 tracker read from a SAM 3 video checkpoint. `--plan-with transformers` reads the names from the
installed transformers and is right about them. Falcon (not Falcon 3, H1 or Mamba) and I-BERT use linear layers of their
own, which transformers 5 does not quantize; they are refused, as are purely convolutional networks.

bitsandbytes' CPU kernels want rows in multiples of 32 and columns in multiples of 64 (on AVX-512 some other shapes are
decoded wrongly); its CUDA kernels do not.
"""


def examine(architecture: str, folder: Path) -> tuple[str, str, str]:
    """(packed, loads in 5, kept on purpose) of one architecture; its checkpoints stay in the folder."""
    both = quantize_both_ways(architecture, folder)
    ours, theirs = packed_weights(both.ours), packed_weights(both.theirs)
    same = ours.keys() == theirs.keys() and all(
        torch.equal(part, other) for path in ours for part, other in zip(ours[path], theirs[path], strict=True)
    )
    loads = "yes" if same else "**no**"
    if architecture in FORWARD_UNKNOWN:
        loads = loads.replace("yes", "bytes")
    elif not torch.equal(first_output(both.ours), first_output(both.theirs)):
        loads = "**no**"
    modules = compare_modules(architecture, folder / "source")
    reasons = Counter(
        reason if reason in DELIBERATE else reason.split(":")[0] for reason in modules.differences.values()
    )
    kept = "; ".join(f"{count} × {reason.split(' (--')[0]}" for reason, count in sorted(reasons.items()))
    return f"{len(ours)} / {len(modules.linear)}", loads, kept


def main(python: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: examine(name, Path(folder) / name) for group in CASES.values() for name in group}
        in_4 = ask_transformers(python, "load", Path(folder))
    words = {"ok": "yes", UNKNOWN: "–", UNREADABLE: "cannot read"}
    versions = {"transformers": transformers.__version__, "bitsandbytes": bitsandbytes.__version__}
    sys.stdout.write(INTRODUCTION.format(**versions))
    for group, names in CASES.items():
        sys.stdout.write(f"## {group.capitalize()}: {len(names)}\n\n")
        sys.stdout.write("| architecture | packed | 5 | 4 | kept on purpose |\n|---|---|---|---|---|\n")
        for name in names:
            packed, loads, kept = rows[name]
            sys.stdout.write(f"| {name} | {packed} | {loads} | {words.get(in_4[name], '**no**')} | {kept} |\n")
        sys.stdout.write("\n")
    sys.stdout.write(CLOSING)


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main(sys.argv[1])
