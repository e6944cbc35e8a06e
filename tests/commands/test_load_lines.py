"""What `quantize` prints to be copied runs as it stands: the code that loads a result, from the
terminal and from the card, and the command that pushes it.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import pytest
import torch
import transformers
from adapters import make_model
from checkpoints import contents, write_source
from click.testing import CliRunner
from command_line import run
from hub_server import Hub
from packaging.requirements import Requirement
from packed_experts import make_mixture

from nf4conv.cli import main
from nf4conv.plan.writing import NO_CONFIG
from nf4conv.report.loading import push_command

pytestmark = pytest.mark.oracle

Make: TypeAlias = Callable[[Path], object]
TOKEN: Final = "hf_writer"
ALIKE: Final = 0.9
"""Least correlation of what a model in 4 bits puts out with what its source does. A model with a
random part has less than half of it.
"""


@dataclass(frozen=True)
class Output:
    """A checkpoint, and what was printed about it."""

    folder: Path  # of source and out
    lines: Mapping[str, str]  # install, load and push, without these words
    card: str  # the code in its card
    card_install: str


def make_llama(folder: Path) -> None:
    make_model(folder, "llama", torch.bfloat16, intermediate_size=128)


def make_encoder(folder: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128}
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    make_model(folder, "BertModel", torch.bfloat16, **sizes, **more)


KINDS: Final[dict[str, tuple[Make, tuple[str, ...]]]] = {
    "plain": (make_llama, ()),
    "FSDP storage": (make_llama, ("--quant-storage", "bfloat16")),
    "pushed": (make_llama, ("--push-to-hub", "me/pushed")),
    "experts, packed": (partial(make_mixture, "qwen3_moe"), ()),
    "experts, portable": (partial(make_mixture, "qwen3_moe"), ("--moe", "portable")),
    "stacked experts, packed": (partial(make_mixture, "gpt_oss"), ()),
    "encoder": (make_encoder, ()),
}
"""What writes a tiny source into a folder, and options of `quantize`."""


def quantize(folder: Path, make: Make, options: tuple[str, ...] = ()) -> Output:
    """Makes an output in a folder, in which the lines that were printed then run."""
    folder.mkdir()
    make(folder / "source")
    before = Path.cwd()
    os.chdir(folder)
    try:
        arguments = ["quantize", "source", "out", "--device", "cpu", *options]
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
    return Output(folder, lines, code, install)


def write_reference(output: Output) -> None:
    """Writes what the source puts out in the release of transformers of this process."""
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
for code, folder, reference in jobs:
    os.chdir(folder)
    names = {}
    try:
        exec(code, names)
        with torch.no_grad():
            out = names["model"].eval()(torch.arange(1, 25)[None])[0]
        both = torch.stack([out.float().flatten(), torch.load(reference).float().flatten()])
        answer = f"{names['model'].dtype}, {torch.corrcoef(both)[0, 1]:.2f} alike"
    except Exception as error:
        answer = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"
    print("ANSWER", answer, flush=True)
"""


def run_all(outputs: list[Output], cache: Path) -> list[str]:
    """Runs the line of the terminal beside each output, and the code of the card in it, in one
    process; returns what became of each.
    """
    jobs = []
    for output in outputs:
        reference = str(output.folder / "reference.pt")
        jobs.append((output.lines["load"], str(output.folder), reference))
        jobs.append((output.card, str(output.folder / "out"), reference))
    environment = {**os.environ, "HF_TOKEN": TOKEN, "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(jobs),
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
    return alike is not None and float(alike[1]) > ALIKE


def allows(install: str, release: str) -> bool:
    """Returns True if an install line allows a release of transformers."""
    assert install.startswith("pip install ")
    for package in shlex.split(install)[2:]:
        wanted = Requirement(package)
        if wanted.name == "transformers":
            return release in wanted.specifier
    return True


def test_code_that_loads_runs_as_it_is_printed(tmp_path: Path, hub: Hub):
    outputs = {}
    for name, kind in KINDS.items():
        outputs[name] = quantize(tmp_path / name, *kind)
        write_reference(outputs[name])
    answers = run_all([*outputs.values()], tmp_path / "cache")
    assert [answer for answer in answers if not loads(answer)] == []
    assert all(answer.startswith("torch.bfloat16, ") for answer in answers)
    for name, output in outputs.items():
        assert output.card_install == output.lines["install"]
        assert allows(output.card_install, transformers.__version__), name
    assert '"me/pushed"' in outputs["pushed"].lines["load"]
    assert b'from_pretrained("me/pushed", ' in hub.repos["me/pushed"].files["README.md"]
    assert "push" not in outputs["pushed"].lines


# --- pushing --------------------------------------------------------------------------------------


def run_push(line: str, folder: Path) -> None:
    """Runs the line with a name of the user's own."""
    command = line.replace("YOUR_NAME", "me")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_line_that_pushes_a_folder(tmp_path: Path, hub: Hub):
    folder = tmp_path / "it's a folder"
    output = quantize(folder, write_source)
    run_push(output.lines["push"], folder)
    pushed = dict(hub.repos["me/out"].files)
    del pushed[".gitattributes"]
    assert pushed == contents(folder / "out")


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("Llama-3.1-8B_nf4", "Llama-3.1-8B_nf4"),
        ("a b(c)", "a-b-c"),
        ("模型", "model"),
    ],
)
def test_the_repository_has_a_name_that_the_hub_takes(tmp_path: Path, name: str, repo: str):
    from huggingface_hub.utils import validate_repo_id

    found = shlex.split(push_command(tmp_path / name))[2]
    assert found == f"YOUR_NAME/{repo}"
    validate_repo_id(found)


def test_a_card_that_was_made_before_it_was_pushed_names_the_repository(tmp_path: Path, hub: Hub):
    output = quantize(tmp_path / "kind", make_llama)
    assert 'from_pretrained(".", ' in output.card
    arguments = ["quantize", str(tmp_path / "kind/source"), str(tmp_path / "kind/out")]
    again = [*arguments, "--push-to-hub", "me/later"]
    done = CliRunner().invoke(main, again, env={"HF_TOKEN": TOKEN})
    assert done.exit_code == 0, done.output
    assert "already complete" in done.stdout
    card = hub.repos["me/later"].files["README.md"]
    assert b'from_pretrained("me/later", ' in card
    assert b'"."' not in card


# --- without config.json --------------------------------------------------------------------------


def test_without_config_json_a_note_says_so_and_nothing_is_pushed(source: Path, tmp_path: Path):
    (source / "config.json").unlink()
    arguments = ["quantize", str(source), str(tmp_path / "out")]
    planned = run(*arguments, "--dry-run")
    assert f"Note: {NO_CONFIG}" in planned.stdout.splitlines()
    done = run(*arguments, "--device", "cpu")
    assert f"Note: {NO_CONFIG}" in done.stderr.splitlines()
    assert f"Note: {NO_CONFIG}" in done.stdout.splitlines()
    assert not [line for line in done.stdout.splitlines() if line.startswith(("push:", "load:"))]
