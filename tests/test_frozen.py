"""Holds what quantize and dequantize write against what commit cd7b292 wrote, byte for byte.

tests/golden/frozen.py made the digests, and they are never made anew. A difference that is wanted
stands in a list below, with its reason.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

import pytest
from frozen import CASES, Workshop, digest, digests, frozen
from inputs import SOURCES


class Difference(NamedTuple):
    """A difference that is wanted; `case` and `file` are globs of names in frozen.json."""

    case: str
    file: str
    reason: str


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "quantize gguf *",
        "README.md",
        "metadata without a licence left two lines of dashes at the end of the card",
    ),
    Difference("quantize *pipeline: *", "README.md", "the card has no table of submodels"),
    Difference("quantize plain: verify=True", "README.md", "the card has no median of errors"),
    Difference(
        "quantize plain: verify=True",
        "nf4conv.json: verified",
        "neither the median, nor a count of bytes that is 0 but for calibrated weights",
    ),
    Difference(
        "* deepseek-v4: *",
        "config.json",
        "expert_dtype said that experts are in FP4, which they no longer are",
    ),
)

# words of the card that are others today: those that cd7b292 wrote by them, each with its reason
CARD_WORDS: dict[str, str] = {
    "import nf4conv.inference.moe": "import nf4conv.moe",  # the loader belongs to a wing
    "| in a vision or audio part |": "| in a vision or audio part (--quantize-towers packs it) |",
}

# sources that are no longer decoded, each with its reason; inputs.py does not write them any more
GONE: dict[str, str] = {
    "hqq": "a layout of its own in 560 lines, for few users",
    "bitnet": "a layout of its own in 200 lines, for few users",
    "quark": "Quark's INT4 needs its config to be told apart; its FP8, INT8 and MXFP4 stay",
}

# options that are no longer in nf4conv.json, each with its reason
GONE_OPTIONS: dict[str, str] = {
    "plan_with": "the rules decide",
    "non_finite": "weights with NaN or infinity are refused",
    "skip_modules": "--exclude keeps the same tensors",
    "quantize_towers": "--include packs them",
    "lora_experts": "the adapter says its order",
    "single_file": "authors publish such files",
}

# cases of options that are gone, by globs of their names, each with its reason
GONE_CASES: dict[str, str] = {"dequantize *: exclude=*": "dequantize decodes all weights"}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("frozen"))


def test_inputs_are_those_that_were_converted(workshop: Workshop):
    for name in SOURCES:
        assert digests(workshop.source(name)) == frozen()["sources"][name], name


@pytest.mark.parametrize("name", CASES)
def test_an_output_has_the_bytes_of_cd7b292(workshop: Workshop, name: str):
    expected = dict(frozen()["outputs"][name])
    output = workshop.output(name)
    found = digests(output)
    if "README.md" in found:
        card = (output / "README.md").read_text(encoding="utf-8")
        for today, before in CARD_WORDS.items():
            card = card.replace(today, before)
        found["README.md"] = digest(card.encode())
    for file, content in expected.items():
        if isinstance(content, dict):
            expected[file] = {key: one for key, one in content.items() if key not in GONE_OPTIONS}
    unlike = {file for file in expected.keys() | found if expected.get(file) != found.get(file)}
    wanted = {each.file for each in DIFFERENCES if fnmatchcase(name, each.case)}
    unwanted = {
        file for file in unlike if not any(fnmatchcase(file, pattern) for pattern in wanted)
    }
    assert not unwanted


def test_every_digest_has_its_case():
    gone = {
        name
        for name in frozen()["outputs"]
        if name.split()[1].rstrip(":") in GONE
        or any(fnmatchcase(name, pattern) for pattern in GONE_CASES)
    }
    assert frozen()["outputs"].keys() - gone == CASES.keys()
    assert frozen()["sources"].keys() == SOURCES.keys() | GONE.keys()
