"""Says what the fuzzing target mutates, which command then runs, and what is wrong with its end."""

import json
import os
import random
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import fuzz_templates as templates
from fuzz_gguf import bytes_case, words_case, write_files
from fuzz_templates import Case, Kind, is_same, passes_verify
from inputs import SOURCES
from mutations import mutate_checkpoint

from nf4conv.sources.unfinished import is_model

OPTIONS = [
    "--no-double-quant",
    "--dtype=float16",
    "--verify",
    "--dry-run",
    "--scales=search",
]


def source_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    """Mutates a checkpoint, and runs any command on it."""
    source = work / "source"
    out = work / "out"
    shutil.copytree(whole, source)
    mutate_checkpoint(chosen, source)
    writing = [option for option in OPTIONS if chosen.random() < 0.15]
    quantize = ["quantize", source, out, *writing]
    decoding = [option for option in writing if option == "--dry-run"]
    commands: list[list[object]] = [
        # three times as often as the others
        quantize,
        quantize,
        quantize,
        ["dequantize", source, out, *decoding],
        ["verify", source],
        ["verify", source, "--source", whole, "--exact"],
        ["inspect", source],
        ["verify", source, "--source", whole, "--tolerance", "0.5"],
    ]
    words = chosen.choice(commands)
    return Case(words, out, partial(passes_verify, words, out))


def adapter_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    adapter = work / "adapter"
    out = work / "out"
    shutil.copytree(whole / "adapter", adapter)
    mutate_checkpoint(chosen, adapter)
    base = whole / "base"
    writing = [option for option in OPTIONS if chosen.random() < 0.15]
    more = [option for option in writing if option == "--dry-run"]
    commands: list[list[object]] = [
        ["quantize", base, out, "--lora", adapter, *writing],
        ["dequantize", base, out, "--lora", adapter, *more],
        ["inspect", adapter],
        ["quantize", adapter, out],
    ]
    words = chosen.choices(commands, (6, 4, 1, 1))[0]
    return Case(words, out, partial(passes_verify, words, out))


# --- results --------------------------------------------------------------------------------------


def finished_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    """Damages a finished result, and runs the same command again or another one."""
    out = work / "out"
    shutil.copytree(whole / "out", out)
    tamper(chosen, out, work)
    source = whole / "source"
    experts = ("--moe", "packed") if whole.name == "packed experts" else ()
    again = ["quantize", source, out, *templates.PART_OPTIONS, *experts]
    commands: list[list[object]] = [
        again,
        again,
        [*again, "--verify"],
        [*again, "--overwrite"],
        ["verify", out],
        ["verify", out, "--source", source],
        ["inspect", out],
        ["dequantize", out, work / "new"],
    ]
    words = chosen.choice(commands)
    if words[0] == "dequantize":
        return Case(words, work / "new", partial(passes_verify, words, work / "new"))
    return Case(words, out, partial(passes_verify, words, out), may_be_whole=True)


def exact_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    """Changes a byte of a weight or of a copied file, or a value of the config."""
    out = work / "out"
    shutil.copytree(whole / "out", out)
    names = [path.name for path in out.glob("*.safetensors")]
    name = chosen.choice([*names, "tokenizer.json", "config.json", "config.json"])
    path = out / name
    if name == "config.json":
        config = json.loads(path.read_text())
        key = chosen.choice(("architectures", "model_type", "vocab_size"))
        config[key] = chosen.choice((None, 7, "x", ["x"], {}))
        path.write_text(json.dumps(config))
    else:
        content = bytearray(path.read_bytes())
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        path.write_bytes(content)
    words: list[object] = ["verify", out, "--source", whole / "source", "--exact"]
    return Case(words, out, lambda done: None if done.exit_code else f"{name}: not seen", True)


def unfinished_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    """Tampers with the records of a run that has not ended, and goes on with it."""
    out = work / "out"
    name = chosen.choice(("parts", "interrupted"))
    shutil.copytree(whole / name, out)
    place = out if chosen.random() < 0.3 else out / ".nf4conv"
    tamper(chosen, place, work)
    source = whole / "source"
    quantize = ["quantize", source, out, *templates.PART_OPTIONS]
    part = f"{chosen.choice('12')}/2"
    commands: list[list[object]] = [
        quantize,
        [*quantize, "--part", part],
        [*quantize, "--overwrite"],
        [*quantize, "--overwrite", "--part", part],
        ["inspect", out],
        ["verify", out],
    ]
    words = chosen.choice(commands)
    return Case(words, out, partial(is_as_expected, words, out, whole / "expected"))


def is_as_expected(words: list[object], out: Path, expected: Path, finished: Any) -> str | None:
    """Returns what is wrong with a result that was made in spite of what was tampered with."""
    if finished.exit_code == 0 and words[0] == "quantize" and is_model(out):
        for path in [*expected.glob("*.safetensors"), expected / "config.json"]:
            if not is_same(path, out / path.name):
                return f"{path.name} differs from that of an uninterrupted run"
    return passes_verify(words, out, finished)


def tamper(chosen: random.Random, folder: Path, work: Path) -> None:
    """Mutates files of a folder; or puts a link there that leads to somebody else's files."""
    if chosen.random() > 0.15:
        mutate_checkpoint(chosen, folder)
        return
    victims = [path for path in folder.rglob("*") if not path.is_symlink()]
    if folder.name == ".nf4conv":
        victims.append(folder)  # OUT itself may be a link: that is the user's own
    victim = chosen.choice(victims)
    name = chosen.choice(("thesis", "shards", "nowhere", ""))
    if victim.is_dir():
        shutil.rmtree(victim)
    else:
        victim.unlink()
    victim.symlink_to(work / "beside" / name)


# --- models that run ------------------------------------------------------------------------------


def evaluate_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    """Mutates a model or its tokens, and compares it with the one that it was made from."""
    out = work / "out"
    source = work / "source"
    shutil.copytree(whole / "source", source)
    shutil.copytree(whole / "out", out)
    mutate_checkpoint(chosen, chosen.choice((out, source)))
    more = ["--tokens=40"] if chosen.random() < 0.3 else []
    words = ["evaluate", out, "--source", source, "--text", source / "ids.npy", *more]
    return Case(words, out, may_be_whole=True)


def calibrate_case(chosen: random.Random, whole: Path, work: Path) -> Case:
    source = work / "source"
    out = work / "out"
    shutil.copytree(whole / "source", source)
    mutate_checkpoint(chosen, source)
    words = ["quantize", source, out, "--calibrate", source / "ids.npy"]
    words += ["--calibration-tokens", "512"]
    return Case(words, out, partial(passes_verify, words, out))


OF_OTHER_CASES = ("adapter", "dora", "adapter of experts")

KINDS: dict[str, Kind] = {
    **{
        name: Kind(write, source_case)
        for name, write in SOURCES.items()
        if not name.startswith("gguf ") and name not in OF_OTHER_CASES
    },
    "our own result": Kind(templates.own, source_case),
    "adapter": Kind(templates.adapter, adapter_case),
    "adapter of experts": Kind(templates.adapter_of_experts, adapter_case),
    "finished result": Kind(templates.finished, finished_case),
    "packed experts": Kind(templates.packed_experts, finished_case),
    "unfinished result": Kind(templates.unfinished, unfinished_case),
    "records of a run": Kind(templates.unfinished, unfinished_case),
    "flips under --exact": Kind(templates.finished, exact_case),
    "evaluate": Kind(templates.runnable, evaluate_case),
    "calibrate": Kind(templates.runnable, calibrate_case),
    "bytes of GGUF": Kind(write_files, bytes_case),
    "words of GGUF": Kind(write_files, words_case),
}


# --- what is watched ------------------------------------------------------------------------------


def write_beside(work: Path) -> None:
    """Writes files of somebody else, which no command may change."""
    folder = work / "beside"
    (folder / "shards").mkdir(parents=True)
    (folder / "thesis").write_text("precious")
    (folder / "shards/a.json").write_text("{}")
    (folder / "run.json").write_text("{}")
    (folder / "config.json").write_text("{}")


def states(folders: Iterable[Path], out: Path) -> dict[str, object]:
    """Returns what tells that files are as they were, but for those in `out`."""
    found: dict[str, object] = {}
    for folder in folders:
        for root, names, files in os.walk(folder):
            if Path(root) == out:
                names.clear()
                continue
            for name in (*names, *files):
                path = Path(root, name)
                if path != out:
                    status = path.lstat()
                    times = (status.st_mtime_ns, status.st_ctime_ns)
                    found[str(path)] = (status.st_ino, status.st_mode, status.st_size, *times)
    return found
