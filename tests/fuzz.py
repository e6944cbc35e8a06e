"""Runs commands on thousands of mutated checkpoints of many kinds. A command may refuse one with an
error of one line, and it must end in time.

    python tests/fuzz.py [--cases N] [--seconds N] [--seed N] [--jobs N]

A case is a number, which decides the kind, the mutations and the command. So
`--seed NUMBER --cases 1` repeats one. Child processes run up to 1000 cases each, with a limit of
memory, and a limit of time for each case. NF4CONV_DEBUG is set: an error that is not meant for the
user then leaves a traceback. These are failures:

    a traceback, or an error of more than one line
    an exit code other than 0, 1 and 2
    memory or time above the limit
    a folder that looks finished after a failure
    a result that our own verify does not pass
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import write_source
from click.testing import CliRunner
from four_bit import pack
from four_bit import write as write_packed
from mutations import mutate_checkpoint
from safetensors.torch import save_file
from test_encoded import ENCODINGS, PLAIN, Q
from test_encoded import random as random_weight
from test_encoded import write as write_encoded

from nf4conv.cli import main as command_line

# of processor time that a case may take; by the clock, ten times as many; most cases take 0.01 s
SECONDS = 20
# bytes that a case may take beside those of the interpreter and torch
MEMORY = 1_500_000_000
BATCH = 1000
UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
CARD = "---\nlicense: mit\nlanguage:\n- en\ntags: [a, b]\n---\n# A model\n"


def plain(folder: Path) -> None:
    write_source(folder, layers=2)
    (folder / "README.md").write_text(CARD)


def pickled(folder: Path, *, is_zip: bool, shards: int = 1) -> None:
    state = PLAIN | {
        f"{Q}.weight": random_weight(64, 64).bfloat16().t(),
        UP: random_weight(128, 64)[32:96],
    }
    write_encoded(folder, {"a": torch.ones(1)})
    (folder / "model.safetensors").unlink()
    files = {name: f"pytorch_model-{number % shards:05d}.bin" for number, name in enumerate(state)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in state.items() if files[name] == file}
        torch.save(part, folder / file, _use_new_zipfile_serialization=is_zip)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )


def four_bit(folder: Path, **options: Any) -> None:
    head = {"lm_head.weight": torch.ones(256, 64).bfloat16()}
    up = pack(UP, torch.randn(64, 128).bfloat16(), **options)
    down = pack(DOWN, torch.randn(128, 64).bfloat16(), **options)
    write_packed(folder, up | head, down)


def own(folder: Path) -> None:
    """Writes a result with checksums, and its source as the sub-folder `original`."""
    source = folder.with_name("own source")
    plain(source)
    run("quantize", source, folder, "--checksum")
    source.rename(folder / "original")


def diffusers(folder: Path) -> None:
    folder.mkdir()
    parts = {
        "text_encoder": ["transformers", "LlamaModel"],
        "tokenizer": ["transformers", "LlamaTokenizer"],
    }
    write_source(folder / "text_encoder", layers=2)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/vocab.json").write_text("{}")
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusionPipeline", **parts})
    )
    (folder / "README.md").write_text(CARD)


def adapter(folder: Path) -> None:
    """Writes an adapter for a checkpoint of the kind `safetensors`."""
    folder.mkdir()
    place = "base_model.model.model.layers.0.mlp.up_proj"
    factors = {
        f"{place}.lora_A.weight": torch.randn(4, 128),
        f"{place}.lora_B.weight": torch.randn(512, 4),
    }
    norm = {"base_model.model.model.layers.0.input_layernorm.weight": torch.ones(64)}
    save_file(factors | norm, folder / "adapter_model.safetensors")
    patterns = {
        "rank_pattern": {"up_proj": 4},
        "alpha_pattern": {"^model.*up_proj": 16},
        "use_rslora": False,
    }
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["up_proj"],
        **patterns,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def encoded(encode: Callable[[], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        made = encode()
        write_encoded(folder, PLAIN | made.stored, made.description)
        if made.description and made.description.get("quant_method") == "modelopt":
            (folder / "hf_quant_config.json").write_text(
                json.dumps({"quantization": made.description})
            )

    return write


KINDS: dict[str, Callable[[Path], None]] = {
    "safetensors": plain,
    "zip pickle": lambda folder: pickled(folder, is_zip=True),
    "legacy pickle": lambda folder: pickled(folder, is_zip=False),
    "sharded pickles": lambda folder: pickled(folder, is_zip=True, shards=2),
    "nf4": lambda folder: four_bit(folder, double_quant=False),
    "nf4 with double quantization": four_bit,
    "fp4": lambda folder: four_bit(folder, quant_type="fp4"),
    "our own result": own,
    "diffusers pipeline": diffusers,
    "adapter": adapter,
    **{encode.__name__: encoded(encode) for encode in ENCODINGS},
}


def run(*arguments: object) -> Any:
    words = [str(argument) for argument in arguments]
    if words[0] != "inspect":
        words += ["--device", "cpu", "--workers", "1", "--buffer-size", "1MB"]
    return CliRunner().invoke(command_line, words, catch_exceptions=False)


OPTIONS = [
    "--no-double-quant",
    "--non-finite=keep",
    "--checksum",
    "--dtype=float16",
    "--verify",
    "--dry-run",
]


def arguments_of(chosen: random.Random, source: Path, whole: Path, out: Path) -> list[object]:
    """Chooses a command for a mutated source; `whole` is the source before the mutation."""
    writing = [option for option in OPTIONS if chosen.random() < 0.15]
    if whole.name == "adapter":
        return ["quantize", whole.with_name("safetensors"), out, "--lora", source, *writing]
    quantize = ["quantize", source, out, "--plan-with=rules", *writing]
    decoding = [option for option in writing if option in ("--checksum", "--dry-run")]
    commands = [
        # three times as often as the others
        quantize,
        quantize,
        quantize,
        ["dequantize", source, out, *decoding],
        ["verify", source],
        ["verify", source, "--source", whole, "--exact"],
        ["inspect", source],
        ["compare", source, whole],
    ]
    return chosen.choice(commands)


def report(record: dict[str, Any]) -> None:
    """Tells the parent process something, even if this one dies next."""
    print(json.dumps(record), flush=True)


def case(number: int, templates: Path, work: Path) -> str | None:
    """Runs a case. Returns what is wrong with it, or None."""
    chosen = random.Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    whole = templates / kind
    source = work / "source"
    out = work / "out"
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, source)
    report({"number": number, "kind": kind, "arguments": ["before it"]})
    mutate_checkpoint(chosen, source)
    arguments = arguments_of(chosen, source, whole, out)
    report({"number": number, "kind": kind, "arguments": [str(word) for word in arguments]})
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)
    try:
        done = run(*arguments)
        report({"exit": done.exit_code})
        found = fault_of(done, arguments, out)
    except BaseException:  # noqa: BLE001 - to be reported, whatever it is
        found = traceback.format_exc()
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    return found


def is_one_error(stderr: str) -> bool:
    """Returns whether a command said one error, in one line of reasonable length."""
    lines = [line for line in stderr.splitlines() if not line.startswith(("Note: ", "Warning: "))]
    return len(lines) == 1 and lines[0].startswith("Error: ") and len(lines[0]) <= 3000


def fault_of(done: Any, arguments: list[object], out: Path) -> str | None:
    """Returns what is wrong with how a command ended, or None."""
    is_finished = (out / "config.json").exists() or (out / "model_index.json").exists()
    if done.exit_code not in (0, 1, 2):
        return f"exit code {done.exit_code}"
    if done.exit_code == 2 and not is_one_error(done.stderr):
        return f"not one line, but {done.stderr[:2000]!r}"
    if "out of memory" in done.stderr:
        return done.stderr
    if done.exit_code and is_finished:
        return "looks finished"
    if not done.exit_code and arguments[0] == "quantize" and is_finished:
        checked = run("verify", out)
        if checked.exit_code:
            return f"verify: {checked.stdout}"
    return None


def child(first: int, count: int, templates: Path) -> None:
    """Runs some cases in this process, and prints their failures as JSON."""
    torch.set_num_threads(1)
    warm = templates.with_name(f"warm {os.getpid()}")
    run("quantize", templates / "safetensors", warm, "--dry-run")  # imports transformers
    run("quantize", templates / "safetensors", warm)  # imports torch
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**33, 2**33))
    with tempfile.TemporaryDirectory(dir=templates.parent) as work:
        for number in range(first, first + count):
            found = case(number, templates, Path(work))
            if found is not None:
                report({"number": number, "fault": found})
    report({"finished": first})


class Batch:
    """A process that runs some cases and writes what it does to a file."""

    def __init__(self, first: int, count: int, templates: Path) -> None:
        self.first, self.count = first, count
        self._output = templates.with_name(f"{first} output")
        self._errors = templates.with_name(f"{first} errors")
        words = [sys.executable, __file__, "--child", str(templates)]
        words += ["--seed", str(first), "--cases", str(count)]
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self._process = subprocess.Popen(words, stdout=output, stderr=errors)

    def wait(self) -> tuple[int, str, str]:
        """Its status, output and errors."""
        return self._process.wait(), self._output.read_text(), self._errors.read_text()


def failures_of(
    batch: Batch, kinds: Counter[str], exits: Counter[int]
) -> tuple[list[str], int | None]:
    """Returns what went wrong in a batch, and the case in which its process died, if it did.

    Counts the cases in `kinds` and `exits`.
    """
    status, output, errors = batch.wait()
    described: dict[int, str] = {}
    faults: list[str] = []
    last = -1
    for line in output.splitlines():
        record = json.loads(line)
        if "kind" in record:
            last = record["number"]
            described[last] = f"{record['kind']}: {' '.join(record['arguments'])}"
        elif "exit" in record:
            kinds[described[last].partition(":")[0]] += 1
            exits[record["exit"]] += 1
        elif "fault" in record:
            number = record["number"]
            faults.append(f"case {number}: {described[number]}\n{record['fault']}")
    if status == 0:
        return faults, None
    reason = f"status {status}"
    if -status in (signal.SIGPROF, signal.SIGALRM):
        reason = f"no end in {SECONDS} s"
    case_name = described.get(last, "before the first")
    faults.append(f"case {last}: {case_name}\n{reason}: {errors[-2000:]}")
    return faults, last if described else None


def fuzz(
    first: int, cases: int, seconds: float, jobs: int
) -> tuple[Counter[str], Counter[int], list[str]]:
    """Runs cases from the number `first` on, in `jobs` processes at a time.

    Returns how many cases of each kind ran, how many ended with each exit code, and what went
    wrong.
    """
    kinds: Counter[str] = Counter()
    exits: Counter[int] = Counter()
    faults: list[str] = []
    room = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=room, prefix="nf4conv-fuzz-") as folder:
        templates = Path(folder, "templates")
        templates.mkdir()
        for kind, write in KINDS.items():
            write(templates / kind)
        starts = range(first, first + cases, BATCH)
        waiting = [(start, min(BATCH, first + cases - start)) for start in starts]
        waiting.reverse()  # they are taken from the end
        running: list[Batch] = []
        while running or (waiting and time.monotonic() < deadline):
            while waiting and len(running) < jobs and time.monotonic() < deadline:
                running.append(Batch(*waiting.pop(), templates))
            batch = running.pop(0)
            found, died_at = failures_of(batch, kinds, exits)
            faults += found
            for fault in found:
                number = fault.split()[1].removesuffix(":")
                again = f"repeat: make fuzz FUZZ='--cases 1 --seed {number}'"
                print(f"{fault}\n    {again}\n", flush=True)
            end = batch.first + batch.count
            if died_at is not None and died_at + 1 < end:
                waiting.append((died_at + 1, end - died_at - 1))
    return kinds, exits, faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    os.environ["NF4CONV_DEBUG"] = "1"
    if options.child:
        child(options.seed, options.cases, options.child)
        return
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    kinds, exits, faults = fuzz(seed, options.cases, options.seconds, options.jobs)
    took = time.monotonic() - started
    codes = ", ".join(f"{count:,} × {code}" for code, count in sorted(exits.items()))
    print(
        f"{kinds.total():,} cases of {len(kinds)} kinds in {took:.0f} s, exit codes {codes}, "
        f"{len(faults)} failures"
    )
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
