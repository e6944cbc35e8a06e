"""`verify`: what is right passes, and every kind of damage is found with a line that names the
tensor or the file.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import write_source
from click.testing import CliRunner
from four_bit import pack, write
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.cli import main
from nf4conv.commands.verify import plan_checkpoint
from nf4conv.errors import PlanError, SourceError
from nf4conv.format.codebook import BLOCKSIZES, CODEBOOKS
from nf4conv.options import VerifyOptions
from nf4conv.report.results import VerifyReport
from nf4conv.report.tolerance import TOLERANCES

CPU = {"device": "cpu", "workers": 2}
SMALL = {"device": "cpu", "workers": 2, "buffer_size": 1}
UP, OTHER_UP = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 2))
Q = "model.layers.1.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"
NORM = "model.layers.0.input_layernorm.weight"
BLOB = f"{UP}.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("verify") / "source")


@pytest.fixture(scope="module")
def good(source: Path) -> Path:
    """Two shards, double quantization."""
    out = source.parent / "good"
    run = {"device": "cpu"}
    nf4conv.quantize(source, out, max_shard_size=150_000, **run)
    return out


@pytest.fixture(scope="module")
def plain(source: Path) -> Path:
    """The checkpoint without double quantization."""
    out = source.parent / "plain"
    nf4conv.quantize(source, out, double_quant=False, device="cpu")
    return out


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def shard_of(folder: Path, name: str) -> Path:
    return next(path for path in shards(folder) if name in load_file(path))


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"}
    )


def change(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Damage that replaces a tensor."""

    def damage(folder: Path) -> None:
        path = shard_of(folder, name)
        tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
        tensors[name] = edit(tensors[name])
        save(tensors, path)

    return damage


def flipped(index: int, bit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """One bit of one byte."""

    def edit(tensor: torch.Tensor) -> torch.Tensor:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        raw[index] ^= 1 << bit
        return raw.view(tensor.dtype).view(tensor.shape)

    return edit


def filled(index: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[index] = value
        return tensor

    return edit


def blob(**changes: Any) -> Callable[[Path], None]:
    """Damage of a quant state: fields replaced, or with None removed."""

    def edit(tensor: torch.Tensor) -> torch.Tensor:
        fields = json.loads(bytes(tensor.tolist())) | changes
        kept = {key: value for key, value in fields.items() if value is not None}
        return torch.frombuffer(bytearray(json.dumps(kept).encode()), dtype=torch.uint8).clone()

    return change(BLOB, edit)


def drop(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = shard_of(folder, name)
        tensors = load_file(path)
        del tensors[name]
        save(tensors, path)

    return damage


def swap(first: str, second: str) -> Callable[[Path], None]:
    """The contents of two tensors of one shape, wherever they are."""

    def damage(folder: Path) -> None:
        paths = {name: shard_of(folder, name) for name in (first, second)}
        values = {name: load_file(path)[name] for name, path in paths.items()}
        for name, other in ((first, second), (second, first)):
            tensors = load_file(paths[name])
            tensors[name] = values[other]
            save(tensors, paths[name])

    return damage


def move(name: str) -> Callable[[Path], None]:
    """To another shard, the index following."""

    def damage(folder: Path) -> None:
        path = shard_of(folder, name)
        other = next(candidate for candidate in shards(folder) if candidate != path)
        tensors, target = load_file(path), load_file(other)
        target[name] = tensors.pop(name)
        save(tensors, path)
        save(target, other)
        index(lambda table: table["weight_map"].update({name: other.name}))(folder)

    return damage


def copy_to_another_shard(folder: Path) -> None:
    path = shard_of(folder, NORM)
    other = next(candidate for candidate in shards(folder) if candidate != path)
    save(load_file(other) | {NORM: load_file(path)[NORM]}, other)


def edited(file: str) -> Callable[..., Callable[[Path], None]]:
    """Returns what makes a damage of an edit of a JSON file, or of other values of its keys."""

    def damage_of(
        edit: Callable[[dict[str, Any]], object] | None = None, **changes: Any
    ) -> Callable[[Path], None]:
        def damage(folder: Path) -> None:
            content = json.loads((folder / file).read_text()) | changes
            if edit is not None:
                edit(content)
            (folder / file).write_text(json.dumps(content))

        return damage

    return damage_of


INDEX = "model.safetensors.index.json"
index = edited(INDEX)
config = edited("config.json")
record = edited("nf4conv.json")


def quantization(**changes: Any) -> Callable[[Path], None]:
    return config(lambda content: content["quantization_config"].update(changes))


def raw(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """The bytes of the first shard."""

    def damage(folder: Path) -> None:
        path = shards(folder)[0]
        path.write_bytes(edit(path.read_bytes()))

    return damage


def header(old: bytes, new: bytes) -> Callable[[Path], None]:
    def edit(content: bytes) -> bytes:
        assert old in content
        assert len(old) == len(new)
        return content.replace(old, new, 1)

    return raw(edit)


def first_offsets_wrong(folder: Path) -> None:
    """Two neighbours overlap."""
    path = shards(folder)[0]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    entries = [entry for name, entry in table.items() if name != "__metadata__"]
    entries[1]["data_offsets"][0] -= 2
    head = json.dumps(table, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + length :])


def low_precision(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


def fp4_map(_: torch.Tensor) -> torch.Tensor:
    return torch.tensor(CODEBOOKS["fp4"].values)


def add_stray(folder: Path) -> None:
    save({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")


def replaced(make: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    """Damage that stores one weight in another way."""

    def damage(folder: Path) -> None:
        path = shard_of(folder, Q)
        new = make(torch.randn(64, 64).bfloat16())
        save(without_q(load_file(path)) | new, path)
        files = dict.fromkeys(new, path.name)
        index(lambda table: table.update(weight_map=without_q(table["weight_map"]) | files))(folder)

    return damage


def without_q(table: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in table.items() if name != Q and not name.startswith(f"{Q}.")}


def skip_list(change: str, entry: str) -> Callable[[Path], None]:
    return config(
        lambda content: getattr(content["quantization_config"]["llm_int8_skip_modules"], change)(
            entry
        )
    )


def add(name: str) -> Callable[[Path], None]:
    """A tensor that the source lacks, in a file and in the index."""

    def damage(folder: Path) -> None:
        path = shards(folder)[0]
        save(load_file(path) | {name: torch.zeros(4).bfloat16()}, path)
        index(lambda table: table["weight_map"].update({name: path.name}))(folder)

    return damage


def rename(old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = shard_of(folder, old)
        tensors = load_file(path)
        tensors[new] = tensors.pop(old)
        save(tensors, path)

    return damage


def delete(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
Damages = dict[str, tuple[Callable[[Path], None], str, str]]


def failing(check: str, name: str, damages: dict[str, Callable[[Path], None]]) -> Damages:
    """Returns damages that one check finds, in one file or tensor."""
    return {kind: (damage, check, name) for kind, damage in damages.items()}


DAMAGE: Damages = {
    **failing("components", UP, {
        "component lost: absmax": drop(f"{UP}.absmax"),
        "component lost: quant_map": drop(f"{UP}.quant_map"),
        "component lost: nested_absmax": drop(f"{UP}.nested_absmax"),
        "component lost: nested_quant_map": drop(f"{UP}.nested_quant_map"),
        "component lost: quant_state": drop(BLOB),
    }),
    **failing("components", f"{UP}.absmax", {
        "codes lost": drop(UP),
        "codes renamed": rename(UP, f"{UP}s"),
    }),
    **failing("index", NORM, {
        "kept tensor lost": drop(NORM),
        "kept tensor renamed": rename(NORM, NORM.replace("input", "output")),
    }),
    "component in another shard": (move(f"{UP}.absmax"), "one shard", f"{UP}.absmax"),
    "tensor in two shards": (copy_to_another_shard, "files", NORM),
    **failing("files", FIRST, {
        "shard truncated": raw(lambda content: content[:-10]),
        "shard cut in the header": raw(lambda content: content[:100]),
        "shard extended": raw(lambda content: content + b"\0" * 8),
        "shard emptied": raw(lambda _: b""),
        "shard missing": delete(FIRST),
        "header bit flipped": raw(lambda old: old[:9] + bytes([old[9] ^ 0x80]) + old[10:]),
        "header length wrong": raw(lambda content: b"\xff" + content[1:]),
        "offsets overlap": first_offsets_wrong,
        "dtype wrong in the header": header(b'"BF16"', b'"BF61"'),
        "format wrong in the metadata": header(b'"pt"', b'"rt"'),
        "no format in the metadata": header(b'"format"', b'"fosmat"'),
    }),
    "stray safetensors": (add_stray, "files", "adapter_model.safetensors"),
    **failing("layout", UP, {
        "codes too few": change(UP, lambda tensor: tensor[:-1]),
        "quant state: shape": blob(shape=[512, 64]),
    }),
    **failing("layout", f"{UP}.absmax", {
        "absmax too short": change(f"{UP}.absmax", lambda tensor: tensor[:-1]),
        "absmax as integers": change(f"{UP}.absmax", lambda tensor: tensor.int()),
        "quant state: other blocksize": blob(blocksize=128),
    }),
    **failing("layout", f"{UP}.nested_absmax", {
        "nested_absmax too long": change(f"{UP}.nested_absmax", lambda old: torch.cat([old, old])),
    }),
    **failing("code maps", f"{UP}.quant_map", {
        "code map of FP4": change(f"{UP}.quant_map", fp4_map),
        "code map: a bit": change(f"{UP}.quant_map", flipped(6, 6)),
        "code map in low precision": change(f"{UP}.quant_map", low_precision),
        "code map: NaN": change(f"{UP}.quant_map", filled(3, math.nan)),
    }),
    **failing("code maps", f"{UP}.nested_quant_map", {
        "nested map: a bit": change(f"{UP}.nested_quant_map", flipped(402, 6)),
    }),
    **failing("scales", UP, {
        "nested_absmax: NaN": change(f"{UP}.nested_absmax", filled(0, math.nan)),
        "nested_absmax: infinite": change(f"{UP}.nested_absmax", filled(0, math.inf)),
    }),
    **failing("quant state", BLOB, {
        "quant state: not JSON": change(BLOB, flipped(0, 3)),
        "quant state: blocksize": blob(blocksize=48),
        "quant state: shape of infinite size": blob(shape=[math.inf]),
        "quant state: impossible shape": blob(shape=[10**4000, 10**4000]),
        "quant state: shape of words": blob(shape=["a"]),
        "quant state: data type": blob(quant_type="fp4"),
        "quant state: dtype": blob(dtype="int8"),
        "quant state: key missing": blob(nested_offset=None),
        "quant state: key too many": blob(extra=1),
        "quant state: requantized absmax": blob(nested_dtype="bfloat16"),
        "quant state: negative offset": blob(nested_offset=-0.5),
    }),
    **failing("uniform", Q, {
        "another data type among them": replaced(partial(pack, Q, quant_type="fp4")),
        "another nesting among them": replaced(partial(pack, Q, double_quant=False)),
    }),
    **failing("index", UP, {
        "index: wrong file": index(lambda table: table["weight_map"].update({UP: SECOND})),
        "index: lacks a tensor": index(lambda table: table["weight_map"].pop(UP)),
    }),
    **failing("index", "ghost", {
        "index: a tensor too many": index(lambda table: table["weight_map"].update(ghost=FIRST)),
    }),
    **failing("index", INDEX, {
        "index: a list for a file": index(lambda table: table["weight_map"].update({UP: [FIRST]})),
        "index: names nothing": index(weight_map={}),
        "index: not JSON": write_text(INDEX, "{"),
        "index: no metadata": index(lambda table: table.pop("metadata")),
    }),
    **failing("config", "config.json", {
        "config: not JSON": write_text("config.json", "{"),
        "config: no quantization": config(lambda content: content.pop("quantization_config")),
        "config: data type": quantization(bnb_4bit_quant_type="fp4"),
        "config: nesting": quantization(bnb_4bit_use_double_quant=False),
        "config: storage": quantization(bnb_4bit_quant_storage="bfloat16"),
        "config: not 4-bit": quantization(load_in_4bit=False),
        "config: a number for a flag": quantization(bnb_4bit_use_double_quant=1),
        "config: null for a flag": quantization(llm_int8_has_fp16_weight=None),
        "config: compute dtype": quantization(bnb_4bit_compute_dtype="bf16"),
        "config: compute dtype in a list": quantization(bnb_4bit_compute_dtype=["bfloat16"]),
        "config: 8-bit": quantization(load_in_8bit=True, load_in_4bit=False),
        "config: other method": quantization(quant_method="gptq"),
        "config: integer threshold": quantization(llm_int8_threshold=6),
    }),
    **failing("config", "quantize_config.json", {
        "config: another quantization": write_text("quantize_config.json", "{}"),
    }),
    **failing("skip list", UP, {
        "skip list: names a packed module": skip_list("append", UP.removesuffix(".weight")),
    }),
    "skip list: lacks a kept module": (replaced(lambda weight: {Q: weight}), "skip list", Q),
    "skip list: lacks the tied head": (skip_list("remove", "lm_head"), "skip list", EMBED),
    **failing("skip list", "config.json", {
        "skip list: not a list": quantization(llm_int8_skip_modules="lm_head"),
        "skip list: not an expression": skip_list("append", "(lm_head"),
    }),
}  # fmt: skip
"""What a checkpoint says about itself."""

DAMAGE_SEEN_BY_THE_SOURCE: Damages = {
    **failing("codes", UP, {
        "codes: a bit": change(UP, flipped(1000, 2)),
        "codes: the last bit": change(UP, flipped(512 * 64 - 1, 0)),
        "codes: a run of zeros": change(UP, filled(7, 0)),
        "two weights swapped": swap(UP, OTHER_UP),
    }),
    **failing("scales", UP, {
        "absmax: a bit": change(f"{UP}.absmax", flipped(100, 5)),
        "nested_absmax: a bit": change(f"{UP}.nested_absmax", flipped(1, 3)),
        "offset": blob(nested_offset=0.25),
        "scales of two weights swapped": swap(f"{UP}.absmax", f"{OTHER_UP}.absmax"),
    }),
    "a tensor too many": (add("model.layers.0.bias"), "names", "model.layers.0.bias"),
    "kept tensor: a bit": (change(EMBED, flipped(77, 1)), "copies", EMBED),
    **failing("copies", NORM, {
        "kept vector: a bit": change(NORM, flipped(0, 0)),
        "kept tensor: another shape": change(NORM, lambda tensor: tensor[:-1]),
    }),
}  # fmt: skip


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "damaged"))


def run_command(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, findings, and what was printed."""
    reports: list[VerifyReport] = []

    def verify(*arguments: Any, **given: Any) -> VerifyReport:
        reports.append(verified(*arguments, **given))
        return reports[0]

    verified = nf4conv.verify
    with mock.patch.object(nf4conv, "verify", verify):
        done = CliRunner().invoke(main, ["verify", str(folder), "--device", "cpu", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    found = [dataclasses.asdict(finding) for report in reports for finding in report.findings]
    return done.exit_code, found, done.output


def assert_found(found: list[dict[str, Any]], check: str, name: str) -> None:
    faults = [finding for finding in found if finding["is_fault"]]
    hits = [
        finding
        for finding in faults
        if finding["check"] == check and name in (finding["tensor"], finding["file"])
    ]
    assert hits, faults


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_that_shows_without_a_source(damaged: Path, kind: str):
    damage, check, name = DAMAGE[kind]
    damage(damaged)
    code, found, output = run_command(damaged)
    assert code == 1, output
    assert_found(found, check, name)
    assert name in output
    assert kind != "config: data type" or "up_proj.weight and others are stored" in output
    assert output.rstrip().splitlines()[-1].startswith("FAILED")


@pytest.mark.parametrize("kind", DAMAGE_SEEN_BY_THE_SOURCE)
def test_damage_that_shows_against_the_source(damaged: Path, source: Path, kind: str):
    damage, check, name = DAMAGE_SEEN_BY_THE_SOURCE[kind]
    damage(damaged)
    code, found, output = run_command(damaged, "--source", str(source))
    assert code == 1, output
    assert_found(found, check, name)


@pytest.mark.parametrize(
    ("edit", "check"),
    [
        (filled(5, math.nan), "scales"),
        (filled(5, math.inf), "scales"),
        (filled(5, -0.1), "scales"),
        (lambda tensor: tensor.bfloat16().view(-1, 1), "layout"),
    ],
    ids=["NaN", "infinite", "negative", "bfloat16, transposed"],
)
def test_absmax_without_double_quantization(
    plain: Path, tmp_path: Path, edit: Callable[[torch.Tensor], torch.Tensor], check: str
):
    folder = Path(shutil.copytree(plain, tmp_path / "damaged"))
    change(f"{UP}.absmax", edit)(folder)
    code, found, _ = run_command(folder)
    assert code == 1
    assert check in {finding["check"] for finding in found if finding["is_fault"]}
    assert any(finding["tensor"].startswith(UP) for finding in found)


@pytest.mark.parametrize("bit", [0, 3, 12, 22, 23, 30])
def test_any_bit_of_a_float32_scale(plain: Path, source: Path, tmp_path: Path, bit: int):
    folder = Path(shutil.copytree(plain, tmp_path / "damaged"))
    change(f"{UP}.absmax", flipped(4 * 9 + bit // 8, bit % 8))(folder)
    code, found, _ = run_command(folder, "--source", str(source))
    assert code == 1
    assert_found(found, "scales", UP)


def test_every_byte_of_the_codes_counts(damaged: Path, source: Path):
    """--exact finds the one code that another rounding could have given as well."""
    change(UP, flipped(4000, 0))(damaged)
    report = nf4conv.verify(damaged, source=source, exact=True, tolerance=1.0, **CPU)
    assert {finding.check for finding in report.findings if finding.is_fault} >= {"exact"}
    [row] = [row for row in report.weights if row.name == UP]
    assert row.errors.differing == 1
    assert not report.identical


def respaced(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the JSON in other bytes, with the same meaning."""
    text = json.dumps(json.loads(bytes(tensor.tolist())), separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone()


EXACT = {
    "map 0": (change(f"{UP}.nested_quant_map", flipped(0, 0)), "1 of nested_quant_map"),
    "map 255": (change(f"{UP}.nested_quant_map", flipped(4 * 255, 0)), "1 of nested_quant_map"),
    "codes 15": (change(f"{UP}.quant_map", flipped(4 * 15, 0)), "1 of quant_map"),
    "spaces": (change(BLOB, respaced), "of quant_state"),
    "shape": (change(UP, lambda tensor: tensor.view(1, -1)), "the codes are [1, "),
}


@pytest.mark.parametrize(("damage", "text"), EXACT.values(), ids=EXACT)
def test_exact_is_every_byte_of_what_describes_a_weight(
    damaged: Path, source: Path, damage: Callable[[Path], None], text: str
):
    """All of them differ by less than other checks look at."""
    damage(damaged)
    without = nf4conv.verify(damaged, source=source, **CPU)
    report = nf4conv.verify(damaged, source=source, exact=True, **CPU)
    [fault] = [found for found in report.findings if found.check == "exact" and UP in found.line()]
    assert fault.is_fault
    assert text in fault.line()
    assert "exact" not in {finding.check for finding in without.findings}


@pytest.mark.parametrize(
    ("component", "index", "size"), [("absmax", 7, 1), ("nested_absmax", 0, 4)]
)
def test_the_first_wrong_scale_has_a_place(
    damaged: Path, source: Path, component: str, index: int, size: int
):
    change(f"{UP}.{component}", flipped(size * index + size - 1, 6))(damaged)
    found = nf4conv.verify(damaged, source=source, **CPU).findings
    [line] = [one.line() for one in found if one.check == "scales" and "source" in one.text]
    assert f"1 of {component}, the first at {index}" in line


# --- what is right --------------------------------------------------------------------------------


def passes(report: VerifyReport) -> None:
    assert report.passed, [finding.line() for finding in report.findings]
    assert all(report.checks.values())


@pytest.mark.parametrize("run", [CPU, SMALL], ids=["buffers", "small buffers"])
def test_our_own_passes_and_is_identical(good: Path, source: Path, run: dict[str, Any]):
    report = nf4conv.verify(good, source=source, exact=True, **run)
    passes(report)
    assert report.findings == ()
    assert report.identical
    assert {row.name for row in report.weights} == {
        f"model.layers.{layer}.{name}.weight"
        for layer in range(6)
        for name in ("mlp.up_proj", "self_attn.q_proj")
    }
    assert all(0.08 < row.error < 0.10 for row in report.weights)
    for row in report.weights:
        assert row.errors.outside == row.errors.not_nearest == row.errors.differing == 0


def test_progress_comes_to_its_end(good: Path, source: Path):
    for options in ({}, {"source": source}):
        read: list[int] = []
        nf4conv.verify(good, **options, **CPU, progress=read.append)
        planned = plan_checkpoint(good, VerifyOptions(**options)).bytes_to_read
        assert sum(read) == pytest.approx(planned, rel=0.01)


def test_without_a_source_nothing_is_compared(good: Path):
    report = nf4conv.verify(good, **CPU)
    passes(report)
    assert report.identical is None
    assert {row.error for row in report.weights} == {None}
    assert "codes" not in report.checks
    assert "not compared with a source" in report.verdict


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_every_format(source: Path, tmp_path: Path, blocksize: int, quant_type: str):
    """Every pair of block size, data type and nesting."""
    double_quant = (BLOCKSIZES.index(blocksize) % 2 == 0) == (quant_type == "nf4")
    options = {"quant_type": quant_type, "blocksize": blocksize, "double_quant": double_quant}
    nf4conv.quantize(source, tmp_path / "out", **options, **CPU)
    report = nf4conv.verify(tmp_path / "out", source=source, exact=True, **CPU)
    passes(report)
    assert report.identical


def test_a_dtype_of_config_that_is_not_stored_is_a_note(good: Path, tmp_path: Path):
    folder = Path(shutil.copytree(good, tmp_path / "copy"))
    config(dtype="float16")(folder)
    report = nf4conv.verify(folder, **CPU)
    passes(report)
    assert any("but config.json says float16" in finding.text for finding in report.findings)


def test_a_head_that_is_not_tied_need_not_be_named(good: Path, tmp_path: Path):
    """A model without a head, or with a separate embedding, has nothing to leave alone."""
    for change in ({"architectures": ["LlamaModel"]}, {"tie_word_embeddings": False}):
        folder = Path(shutil.copytree(good, tmp_path / next(iter(change))))
        skip_list("remove", "lm_head")(folder)
        config(**change)(folder)
        passes(nf4conv.verify(folder, **CPU))


def test_codes_stored_as_floats_pass_with_a_note(tmp_path: Path):
    stored = pack(UP, torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16())
    stored[UP] = stored[UP].view(-1).view(torch.bfloat16).view(-1, 1)
    folder = write(tmp_path / "made", stored, quantization={"bnb_4bit_quant_storage": "bfloat16"})
    report = nf4conv.verify(folder, **CPU)
    passes(report)
    assert any("for FSDP only" in finding.text for finding in report.findings)


@pytest.mark.oracle
@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
def test_a_checkpoint_of_transformers_and_bitsandbytes(tmp_path: Path, double_quant: bool):
    from adapters import make_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_model(tmp_path / "source", "llama", torch.bfloat16, intermediate_size=128)
    chosen = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", quantization_config=chosen, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "theirs")
    code, found, output = run_command(tmp_path / "theirs", "--source", str(tmp_path / "source"))
    assert code == 0, output
    assert not [finding for finding in found if finding["is_fault"]]


# --- tolerance ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tolerance", "code"), [("0.05", 1), ("0.2", 0)])
def test_the_tolerance_is_on_the_relative_error(
    good: Path, source: Path, tmp_path: Path, tolerance: str, code: int
):
    folder = Path(shutil.copytree(good, tmp_path / "copy"))
    found_code, found, output = run_command(
        folder, "--source", str(source), "--tolerance", tolerance
    )
    assert found_code == code, output
    assert {finding["check"] for finding in found} == ({"tolerance"} if code else set())


def expected_error(
    quant_type: str, blocksize: int, density: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """E‖W − Ŵ‖ / ‖W‖ for independent weights of a density: the integral of docs/verify.md, by the
    trapezium rule.

    Given the largest magnitude a of a block, the others are distributed as the density cut off at
    a; the largest itself has no error.
    """
    grid = torch.cat(
        [torch.linspace(0, 8, 3000), torch.logspace(math.log10(8.001), 5, 3000)]
    ).double()
    p = 2 * density(grid)
    p /= torch.trapezoid(p, grid)
    below = torch.cat([torch.zeros(1), torch.cumulative_trapezoid(p, grid)]).clamp(0, 1)
    largest = blocksize * below ** (blocksize - 1) * p
    values = torch.tensor(CODEBOOKS[quant_type].values, dtype=torch.float64)
    steps = torch.linspace(0, 1, 2001, dtype=torch.float64)
    up, down = (
        (sign * steps[:, None] - values[None, :]).abs().amin(dim=1) ** 2 for sign in (1.0, -1.0)
    )
    inside = density(steps[None, :] * grid[:, None])
    relative = torch.trapezoid(inside * (up + down) / 2, steps) / torch.trapezoid(inside, steps)
    squared = torch.trapezoid(largest * (blocksize - 1) / blocksize * grid**2 * relative, grid)
    return float((squared / torch.trapezoid(p * grid**2, grid)).sqrt())


def student(x: torch.Tensor) -> torch.Tensor:
    """Student's t distribution with 4 degrees of freedom, not normalised."""
    return (1 + x**2 / 4) ** -2.5


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [64, 4096])
def test_the_default_is_what_heavy_tails_give(quant_type: str, blocksize: int):
    error = expected_error(quant_type, blocksize, student)
    tolerance = TOLERANCES["absmax", quant_type][BLOCKSIZES.index(blocksize)]
    assert tolerance - 0.0015 < error <= tolerance


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": math.nan}, "expected a number from 0 to 2"),
        ({"tolerance": 0.1}, "give --source"),
        ({"exact": True}, "give --source"),
    ],
    ids=str,
)
def test_requests_that_make_no_sense(good: Path, options: dict[str, object], message: str):
    with pytest.raises(PlanError, match=message):
        nf4conv.verify(good, **options, **CPU)


def test_what_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(SourceError, match="no such file or folder"):
        nf4conv.verify(tmp_path / "nothing", **CPU)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError):
        nf4conv.verify(tmp_path / "empty", **CPU)
    done = CliRunner().invoke(main, ["verify", str(tmp_path / "nothing")])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1


def test_a_checkpoint_that_says_nothing_of_its_making_is_not_verified_alone(
    source: Path, tmp_path: Path
):
    """In 16 bits or packed by another method."""
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    for _ in range(2):
        done = CliRunner().invoke(main, ["verify", str(copy)])
        assert done.exit_code == 2
        assert done.stdout == ""
        assert "nothing to verify" in done.stderr
        assert done.stderr.count("\n") == 1
        change(UP, lambda tensor: tensor.to(torch.int32))(copy)


def test_a_checkpoint_that_says_it_is_in_4_bits_and_is_not(source: Path, tmp_path: Path):
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config(quantization_config=quantization)(copy)
    code, found, _ = run_command(copy)
    assert code == 1
    assert any("has no weight in 4 bits" in finding["text"] for finding in found)


@pytest.mark.parametrize("kind", ["another size", "other values", "decoded from others"])
def test_another_model_as_the_source_is_told_in_one_line(
    good: Path, source: Path, tmp_path: Path, kind: str
):
    out, other = Path(shutil.copytree(good, tmp_path / "out")), tmp_path / "other"
    if kind == "another size":
        write_source(other, layers=2)
    else:
        shutil.copytree(source, other)
        random = torch.Generator().manual_seed(7)
        for file in shards(other):
            for name, tensor in load_file(file).items():
                if tensor.dim() == 2:
                    new = torch.randn(tensor.shape, generator=random).to(tensor.dtype)
                    change(name, lambda _, new=new: new)(other)
    if kind == "decoded from others":
        nf4conv.quantize(other, tmp_path / "packed", **CPU)
        nf4conv.dequantize(good, tmp_path / "decoded", **CPU)
        out, other = tmp_path / "decoded", tmp_path / "packed"
    code, found, output = run_command(out, "--source", str(other))
    assert code == 1
    [fault] = [finding for finding in found if finding["is_fault"]]
    assert fault["check"] == "source"
    assert "is not what this was made from" in fault["text"]
    assert "FAILED: the source is not what this was made from" in output


# --- where nothing says how it was made -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        ((), 2, "compared, not judged: a checkpoint, 1 of 19 tensors differ"),
        (("--tolerance", "0.1"), 0, "within the tolerance: a checkpoint, 1 of 19 tensors differ"),
        (("--tolerance", "1e-6"), 1, "FAILED: 1 fault in a checkpoint, 1 of 19 tensors differ"),
        (("--exact",), 1, "FAILED: 1 fault in a checkpoint"),
    ],
)
def test_two_checkpoints_in_16_bits(
    source: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, verdict: str
):
    other = Path(shutil.copytree(source, tmp_path / "other"))
    change(UP, flipped(100, 3))(other)
    found_code, found, output = run_command(other, "--source", str(source), *arguments)
    assert found_code == code, output
    assert verdict in output
    assert "passed" not in output
    [finding] = found
    assert (finding["check"], finding["tensor"]) == ("values", UP)
    assert finding["is_fault"] == (code == 1)
    assert finding["text"].startswith("1 of ")
    same, _, output = run_command(
        Path(shutil.copytree(source, tmp_path / "same")), "--source", str(source), "--exact"
    )
    assert same == 0
    assert "all values of 19 tensors equal those of the source" in output


def test_tensors_that_only_one_has_are_faults(source: Path, tmp_path: Path):
    less = Path(shutil.copytree(source, tmp_path / "less"))
    drop(UP)(less)
    index(lambda table: table["weight_map"].pop(UP))(less)
    for out, other in ((less, source), (source, less)):
        report = nf4conv.verify(out, source=other, tolerance=2, **CPU)
        assert report.exit_code == 1
        assert [found.tensor for found in report.findings if found.check == "names"] == [UP]


def test_a_pickle_and_safetensors(source: Path, tmp_path: Path):
    tensors: dict[str, torch.Tensor] = {}
    for file in shards(source):
        tensors |= load_file(file)
    (tmp_path / "pickle").mkdir()
    torch.save(tensors, tmp_path / "pickle/pytorch_model.bin")
    shutil.copy(source / "config.json", tmp_path / "pickle")
    report = nf4conv.verify(tmp_path / "pickle", source=source, exact=True, **CPU)
    assert report.exit_code == 0
    assert report.relation == "none"
