"""What a result says of itself is what is in it: 4-bit sources × options that contradict them.

nf4conv.json, config.json, the report, `inspect` and `verify` must agree with the tensors,
whatever was asked for.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents, save_adapter, save_model
from command_line import run
from four_bit import CONFIG, pack, write
from safetensors.torch import load_file

import nf4conv
from nf4conv.declaring import deciding
from nf4conv.errors import OutputError, PlanError
from nf4conv.format.codebook import SCALES
from nf4conv.format.layout import Format
from nf4conv.options import QuantizeOptions
from nf4conv.plan.provenance import Provenance, groups_of
from nf4conv.sources.record import PACKED, any_number

CPU = {"device": "cpu", "workers": 2}
LAYERS = 3
MODULES = ("self_attn.q_proj", "mlp.up_proj")
NAMES = [f"model.layers.{layer}.{module}.weight" for layer in range(LAYERS) for module in MODULES]
Q_PROJS = [name for name in NAMES if "q_proj" in name]


def random(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).bfloat16()


def weight(name: str) -> torch.Tensor:
    rows = 64 if name in Q_PROJS else 128
    return random(rows, 64, NAMES.index(name))


def others() -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": random(256, 64, 100),
        "lm_head.weight": random(256, 64, 101),
    }


def write_plain(folder: Path) -> Path:
    tensors = {name: weight(name) for name in NAMES} | others()
    return save_model(folder, tensors, CONFIG)


def write_other_tool(folder: Path, blocksizes: dict[str, int]) -> Path:
    """A checkpoint of another tool, without nf4conv.json, in some block size for each module."""
    tensors = others()
    for name in NAMES:
        [blocksize] = [size for module, size in blocksizes.items() if module in name]
        tensors |= pack(name, weight(name), blocksize=blocksize)
    return write(folder, tensors)


def write_adapter(folder: Path) -> Path:
    """An adapter of the q_proj of all layers."""
    factors = {}
    for seed, name in enumerate(Q_PROJS):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        factors[f"{module}.lora_A.weight"] = random(4, 64, seed)
        factors[f"{module}.lora_B.weight"] = random(64, 4, seed + 50)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    return save_adapter(folder, factors, config)


def as_of_0_1_0(folder: Path, out: Path, **decided: Any) -> Path:
    """A result with the record that release 0.1.0 wrote."""
    shutil.copytree(folder, out)
    record = json.loads((out / "nf4conv.json").read_text())
    del record["weights"], record["not_packed"]
    record["schema_version"] = 1
    record["options"] |= {"quant_type": "nf4", "blocksize": 64, "scales": "absmax"} | decided
    (out / "nf4conv.json").write_text(json.dumps(record, indent=2))
    return out


SEARCH = {"scales": "search"}
SINGLE_FP4 = {"quant_type": "fp4", "blocksize": 128, "double_quant": False}
MADE = {
    "nf4": {},
    "searched": SEARCH,
    "fp4": SINGLE_FP4,
    "fsdp": {"quant_storage": "bfloat16"},
}

OPTIONS = {
    "nothing": {},
    "nf4": {"quant_type": "nf4"},
    "fp4": {"quant_type": "fp4"},
    "128": {"blocksize": 128},
    "single": {"double_quant": False},
    "bfloat16 codes": {"quant_storage": "bfloat16"},
    "float16": {"dtype": "float16"},
    "search": SEARCH,
    "search 128": {"scales": "search", "blocksize": 128},
    "lora": {"lora": ("ADAPTER",)},
    "search lora": {"scales": "search", "lora": ("ADAPTER",)},
}

# of each source, what becomes of its weights with each of the OPTIONS: "=" all stay as they are,
# "+" all are packed anew, "q" and "u" only the q_proj or only the up_proj are, "!" it is refused
TABLE = {
    "plain": "++++ ++++ +++",
    "nf4": "==++ +=+! +qq",
    "searched": "==++ +=+= +qq",
    "fp4": "=+== ==+! !qq",
    "fsdp": "==++ +=+! +qq",
    "other tool": "==++ +=+! +qq",
    "two block sizes": "qq+u +q+q uqq",
    "two kinds of scales": "==++ +=+= +qq",
    "0.1.0": "==++ +=+! +qq",
}
ANEW: dict[str, Callable[[str], bool]] = {
    "=": lambda name: False,  # noqa: ARG005
    "+": lambda name: True,  # noqa: ARG005
    "q": lambda name: name in Q_PROJS,
    "u": lambda name: name not in Q_PROJS,
}


class World:
    """All sources of the table, each with the scales that its weights are known to have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.adapter = write_adapter(folder / "adapter")
        self.plain = write_plain(folder / "plain")
        self.sources = {"plain": self.plain}
        self.scales = {"plain": dict.fromkeys(NAMES, "")}
        for name, options in MADE.items():
            out = folder / name
            nf4conv.quantize(self.plain, out, **options, **CPU)
            self._add(name, out, options.get("scales") or "absmax")
        alike = {"q_proj": 64, "up_proj": 64}
        self._add("other tool", write_other_tool(folder / "other", alike), "absmax")
        # most elements are in blocks of 64
        unlike = {"q_proj": 128, "up_proj": 64}
        self._add("two block sizes", write_other_tool(folder / "unlike", unlike), "absmax")
        mixed = folder / "mixed"
        merged = {**SEARCH, "lora": (str(self.adapter),)}
        nf4conv.quantize(self.sources["nf4"], mixed, **merged, **CPU)
        self._add("two kinds of scales", mixed, "absmax")
        self.scales["two kinds of scales"] |= dict.fromkeys(Q_PROJS, "search")
        self._add("0.1.0", as_of_0_1_0(self.sources["nf4"], folder / "old"), "absmax")

    def _add(self, name: str, folder: Path, scales: str) -> None:
        self.sources[name] = folder
        self.scales[name] = dict.fromkeys(NAMES, scales)

    def options(self, name: str) -> dict[str, Any]:
        asked = OPTIONS[name]
        return {**asked, "lora": (str(self.adapter),)} if asked.get("lora") else asked


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("provenance"))


def tensors_of(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "model.safetensors")
    return {name: part.view(torch.uint8).numpy().tobytes() for name, part in tensors.items()}


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "nf4conv.json").read_text())
    return record


def recorded_of_each(folder: Path) -> dict[str, dict[str, Any]]:
    """What nf4conv.json says of each weight, read as its documentation says."""
    groups = record_of(folder)["weights"]
    found = {}
    for name in NAMES:
        named = [
            group for group in groups if {name, any_number(name)} & set(group.get("names", []))
        ]
        if not named:
            named = [group for group in groups if "names" not in group]
        [found[name]] = named
    assert Counter(map(str, found.values())) == {str(group): group["count"] for group in groups}
    return {name: dict(group) for name, group in found.items()}


def faults(folder: Path, source: Path | None = None, **options: Any) -> list[str]:
    report = nf4conv.verify(folder, source=source, **options, **CPU)
    return [finding.line() for finding in report.findings if finding.is_fault]


class Expected:
    """What a result has to be, known from the source and the options alone.

    Args:
        source: the checkpoint.
        options: what is asked for.
        scales_before: how each weight of the source was scaled; empty for a source in 16 bits.
        is_anew: says whether a weight is packed anew, given its name.
    """

    def __init__(
        self,
        source: Path,
        options: dict[str, Any],
        scales_before: dict[str, str],
        is_anew: Callable[[str], bool],
    ) -> None:
        self.source = source
        self.options = options
        self.anew = {name for name in NAMES if is_anew(name)}
        self.stay = len(NAMES) - len(self.anew)
        elements: Counter[str] = Counter()
        for name in NAMES:
            elements[scales_before[name]] += weight(name).numel()
        [(most, _)] = elements.most_common(1)
        self.scales = {}
        for name in NAMES:
            packed = options.get("scales") or most or "absmax"
            self.scales[name] = packed if name in self.anew else scales_before[name]
        config = json.loads((source / "config.json").read_text())
        self.dtype = options.get("dtype") or config["dtype"]
        self.made_from = {}
        for row in nf4conv.inspect(source).tensors:
            start = row.dtype
            if row.format is not None:
                start = f"bitsandbytes {row.format}"
            if options.get("lora") and row.name in Q_PROJS:
                start += ", merged with adapters"
            self.made_from[row.name] = start

    def check_plan(self) -> None:
        rows = {
            row.name: row for row in nf4conv.plan_quantize(self.source, **self.options).made.rows()
        }
        for name in NAMES:
            assert rows[name].action == ("pack" if name in self.anew else "stay"), name

    def make(self, out: Path) -> None:
        report = nf4conv.quantize(self.source, out, **self.options, **CPU, verify=True)
        assert (report.totals.packed, report.totals.stay, report.totals.copied) == (
            len(NAMES),
            self.stay,
            2,
        )
        note = any("a search needs the 16-bit model" in note for note in report.notes)
        unsearched = {self.scales[name] for name in NAMES if name not in self.anew} - {"search"}
        assert note is (self.options.get("scales") == "search" and bool(unsearched))
        before, after = tensors_of(self.source), tensors_of(out)
        for name in set(NAMES) - self.anew:
            for part in before:
                if part == name or part.startswith(f"{name}."):
                    assert after[part] == before[part], part

    def check_record(self, out: Path) -> None:
        stored = {row.name: row for row in nf4conv.inspect(out).tensors}
        for name, group in recorded_of_each(out).items():
            row = stored[name]
            found = row.format
            assert found is not None
            assert group.pop("count")
            group.pop("names", None)
            assert group == {
                "origin": "packed" if name in self.anew else "kept as found",
                "from": self.made_from[name],
                "quant_type": found.quant_type,
                "blocksize": found.blocksize,
                "double_quant": found.double_quant,
                "quant_storage": found.quant_storage,
                "scales": self.scales[name],
                "dtype": row.dtype,
            }, name
        record = record_of(out)
        assert record["not_packed"] == {self.dtype: 2}
        left_out = {"lora", "calibrate"}  # these are paths
        decided = deciding(QuantizeOptions(**self.options))
        asked = {key: value for key, value in decided.items() if key not in left_out}
        assert record["options"] == json.loads(json.dumps(asked))

    def check_config(self, out: Path) -> None:
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        for group in recorded_of_each(out).values():
            assert config["bnb_4bit_quant_type"] == group["quant_type"]
            assert config["bnb_4bit_use_double_quant"] is group["double_quant"]
            assert config["bnb_4bit_quant_storage"] == group["quant_storage"]

    def check_inspect(self, out: Path) -> None:
        inspected = nf4conv.inspect(out)
        record = record_of(out)
        assert inspected.made == record
        assert not [finding for finding in inspected.findings if finding.is_fault]
        shown = run("inspect", out).stdout
        for group in record["weights"]:
            scales = {"absmax": "absmax", "search": "searched scales"}[group["scales"]]
            line = f"{group['count']} weights {group['origin']}, from {group['from']}, {scales}"
            assert line in shown.splitlines()

    def check_verify(self, out: Path) -> None:
        assert faults(out) == []
        assert faults(out, self.source, exact=True, lora=self.options.get("lora", ())) == []
        verified = nf4conv.verify(out, **CPU)
        assert {row.name: row.format.scales for row in verified.weights} == self.scales

    def check_rerun(self, out: Path) -> None:
        before = contents(out)
        again = nf4conv.quantize(self.source, out, **self.options, **CPU, verify=True)
        assert again.already_complete
        assert contents(out) == before

    def check(self, out: Path) -> None:
        self.check_plan()
        self.make(out)
        self.check_record(out)
        self.check_config(out)
        self.check_inspect(out)
        self.check_verify(out)
        self.check_rerun(out)


def cells() -> list[Any]:
    found = []
    for source, row in TABLE.items():
        for option, fate in zip(OPTIONS, row.replace(" ", ""), strict=True):
            found.append(pytest.param(source, option, fate, id=f"{source} × {option}"))
    return found


@pytest.mark.parametrize(("source", "option", "fate"), cells())
def test_a_result_says_what_is_in_it(world: World, tmp_path: Path, source, option, fate):
    folder, options = world.sources[source], world.options(option)
    if fate == "!":
        with pytest.raises(PlanError, match="--scales search needs the 16-bit model"):
            nf4conv.plan_quantize(folder, **options)
        with pytest.raises(PlanError, match="leave --scales out"):
            nf4conv.quantize(folder, tmp_path / "out", **options, **CPU)
        assert not (tmp_path / "out").exists()
        return
    out = tmp_path / "out"
    made = Expected(folder, options, world.scales[source], ANEW[fate])
    made.check(out)

    # once more, as it is
    again = tmp_path / "again"
    Expected(out, {}, made.scales, ANEW["="]).check(again)
    assert tensors_of(again) == tensors_of(out)


def test_a_result_of_another_release_is_another_job(world: World):
    with pytest.raises(OutputError, match="another release of nf4conv wrote it"):
        nf4conv.quantize(world.plain, world.sources["0.1.0"], **CPU)


def test_groups_of_100_000_weights_take_little_room():
    formats = [Format("nf4", 64, True, "bfloat16", scales=scales) for scales in SCALES]
    kinds = [Provenance(PACKED, "bfloat16", False, format) for format in formats]
    names = [f"model.layers.{number % 100}.experts.{number}.w1.weight" for number in range(10**5)]
    weights = {name: kinds[number % 7 == 0] for number, name in enumerate(names)}
    weights |= {name.replace("w1", "w2"): kinds[1] for name in names[:1000]}
    groups = groups_of(weights)
    assert [group["count"] for group in groups] == [10**5 - 14286, 14286 + 1000]
    found = set(groups[1]["names"])
    for name, kind in weights.items():
        assert bool({name, any_number(name)} & found) is (kind is kinds[1])
    assert len(found) == 14286 + 1  # one pattern for all of w2
