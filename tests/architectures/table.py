"""Writes table.md beside it, every architecture of the sweep with what was found, and
docs/selection.md's table.

python tests/architectures/table.py PYTHON_WITH_TRANSFORMERS_4
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import bitsandbytes
import torch
import transformers
from cases import (
    CASES,
    FORWARD_UNKNOWN,
    MIXTURE_EXCEPTIONS,
    MIXTURES,
    STACKED_MIXTURES,
)
from roundtrip import (
    UNKNOWN,
    UNREADABLE,
    ask_transformers,
    compare_modules,
    first_output,
    packed_weights,
    quantize_both_ways,
)
from test_architectures import DELIBERATE, ONE_CLASS

import nf4conv

INTRODUCTION = """# Architectures

`make test-others` makes a small random checkpoint of each architecture with transformers
{transformers}, quantizes it with nf4conv, and loads the result. It fails on any difference that is
not listed here. CI runs it for some of the architectures.

- **packed**: the number of linear layers that nf4conv packs, and the number that transformers could
  pack.
- **5**: "yes" means that transformers {transformers} loads the result. Its packed weights are, byte
  for byte, those of the model that transformers itself quantizes with the same skip list
  (bitsandbytes {bitsandbytes}, CPU), and the model gives the same output. "bytes": the sweep has no
  inputs for the model, and compared only the weights.
- **4**: the same with transformers 4.57.6. A dash means that it does not know the architecture.
  "its own": it cannot read the checkpoint that transformers 5 saves for this architecture, but
  nf4conv quantized the checkpoint that it saves itself, and both load the result. "cannot read":
  neither could be tried.
- **kept on purpose**: the layers that transformers packs by its own list and nf4conv does not, and
  why.

The same checkpoints also load as the model without its head (`AutoModel`), and with a head for
sequence classification, if transformers has such classes. These load only as the class that saved
them:

{one_class}
"""


CLOSING = """## Known gaps

transformers 5 loads a few architectures under names that the rules do not foresee: Gradium Phonon
TTS, NeMo SpeechLM and Jev. Falcon (not Falcon 3, H1 or Mamba) and I-BERT use linear
layers of their own, which transformers 5 does not quantize. nf4conv refuses them, and it refuses
purely convolutional networks. Architectures that need timm are not in the sweep: Gemma 3n with
pictures and sound, and FastVLM, were tried by hand. Llama 4, whose experts are split, has tests of
its own.

transformers 4.53.3 and 5.0.0 once loaded the checkpoints that transformers 4.57 saved. 4.53.3
loaded 432 of the 435 that it knows: it looks for the quant states of ColPali, ShieldGemma 2 and
CANINE under wrong names. 5.0.0 loaded all 494 that it can read.

bitsandbytes' CPU kernels require rows in multiples of 32 and columns in multiples of 64. On AVX-512
they decode some other shapes wrongly. Its CUDA kernels have no such limits.
"""


@dataclass(frozen=True)
class Row:
    """The findings about an architecture.

    Attributes:
        architecture: its class.
        packed: linear layers that are packed.
        linear: those that transformers could pack.
        in_5: "yes", "bytes" or "**no**".
        kept: why others are not packed that transformers packs; empty if it packs the same.
    """

    architecture: str
    packed: int
    linear: int
    in_5: str
    kept: str

    @property
    def model_type(self) -> str:
        """Returns the model_type that stands in config.json."""
        name: str = getattr(transformers, self.architecture).config_class.model_type
        return name


def examine(architecture: str, folder: Path) -> Row:
    """Quantize and load one architecture; its checkpoints stay in the folder."""
    both = quantize_both_ways(architecture, folder)
    ours, theirs = packed_weights(both.ours), packed_weights(both.theirs)
    same = ours.keys() == theirs.keys() and all(
        torch.equal(part, other)
        for path in ours
        for part, other in zip(ours[path], theirs[path], strict=True)
    )
    loads = "yes" if same else "**no**"
    if architecture in FORWARD_UNKNOWN:
        loads = loads.replace("yes", "bytes")
    elif not torch.equal(first_output(both.ours), first_output(both.theirs)):
        loads = "**no**"
    modules = compare_modules(architecture, folder / "source")
    reasons = Counter(
        reason if reason in DELIBERATE else reason.split(":")[0]
        for reason in modules.differences.values()
    )
    kept = "; ".join(
        f"{count} × {reason.split(' (--')[0]}" for reason, count in sorted(reasons.items())
    )
    return Row(architecture, len(ours), len(modules.linear), loads, kept)


def ask_about_its_own(python: str, architectures: Sequence[str], folder: Path) -> dict[str, str]:
    """Returns what transformers 4 makes of our output for checkpoints that it saved itself."""
    saved = ask_transformers(python, "save", folder, *architectures)
    known = [name for name, answer in saved.items() if answer == "ok"]
    for name in known:
        nf4conv.quantize(
            folder / name / "source", folder / name / "out", double_quant=False, moe="portable"
        )
    if not known:
        return {}
    in_4 = ask_transformers(python, "load", folder, *known)
    in_5 = ask_transformers(sys.executable, "load", folder, *known)
    return {name: "its own" for name in known if in_4[name] == "ok" and in_5[name] == "ok"}


def full_table(rows: Mapping[str, Row], in_4: Mapping[str, str]) -> Iterator[str]:
    for group, names in CASES.items():
        yield f"## {group.capitalize()}: {len(names)}\n\n"
        yield "| architecture | model type | packed | 5 | 4 | kept on purpose |\n"
        yield "|---|---|---|---|---|---|\n"
        for row in (rows[name] for name in names):
            packed = f"{row.packed} / {row.linear}"
            loads = f"{row.in_5} | {in_4[row.architecture]}"
            yield f"| {row.architecture} | {row.model_type} | {packed} | {loads} | {row.kept} |\n"
        yield "\n"


def mixtures_table() -> Iterator[str]:
    """Yields what test_mixtures.py holds: which mixtures load with packed experts."""
    yield f"## Mixtures of experts: {len(MIXTURES)}\n\n"
    yield "With nf4conv installed, transformers 5 loads these with all experts packed by\n"
    yield "`--moe packed`. Decoded experts are, bit for bit, what `dequantize` writes; logits\n"
    yield "and words are those of the model with decoded experts, in `eager`, `batched_mm` and\n"
    yield "`grouped_mm`.\n\n"
    yield "| architecture | stored in stacks | exception |\n|---|---|---|\n"
    for name in MIXTURES:
        stacked = "yes" if name in STACKED_MIXTURES else ""
        yield f"| {name} | {stacked} | {MIXTURE_EXCEPTIONS.get(name, '')} |\n"
    yield "\n"


def short_table(rows: Mapping[str, Row], in_4: Mapping[str, str]) -> Iterator[str]:
    """Yields the number of each kind; docs/selection.md has this table too."""
    yield "| | architectures | load in 5 | load in 4.57, of those it can read "
    yield "| identical module set |\n"
    yield "|---|---|---|---|---|\n"
    for group, names in CASES.items():
        known = [name for name in names if in_4[name] not in ("–", "cannot read")]
        loads = sum(rows[name].in_5 != "**no**" for name in names)
        loads_in_4 = sum(in_4[name] in ("yes", "its own") for name in known)
        identical = sum(not rows[name].kept for name in names)
        yield f"| {group} | {len(names)} | {loads} | {loads_in_4} / {len(known)} | {identical} |\n"


def main(python: str) -> None:
    """Write both tables."""
    with tempfile.TemporaryDirectory() as made_by_5, tempfile.TemporaryDirectory() as made_by_4:
        rows = {
            name: examine(name, Path(made_by_5) / name)
            for group in CASES.values()
            for name in group
        }
        answers = ask_transformers(python, "load", Path(made_by_5))
        unreadable = [name for name, answer in answers.items() if answer == UNREADABLE]
        its_own = ask_about_its_own(python, unreadable, Path(made_by_4))
    words = {"ok": "yes", UNKNOWN: "–", UNREADABLE: "cannot read"}
    in_4 = {
        name: its_own.get(name, words.get(answer, "**no**")) for name, answer in answers.items()
    }
    introduction = INTRODUCTION.format(
        transformers=transformers.__version__,
        bitsandbytes=bitsandbytes.__version__,
        one_class="".join(f"- {name}\n" for name in ONE_CLASS),
    )
    Path("tests/architectures/table.md").write_text(
        introduction
        + "".join(short_table(rows, in_4))
        + "".join(full_table(rows, in_4))
        + "".join(mixtures_table())
        + CLOSING
    )


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main(sys.argv[1])
