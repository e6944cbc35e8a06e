"""What `quantize` prints to be copied runs as it stands: the code that loads a result, from the
terminal and from the card, and the command that pushes it.

Here with the transformers of this environment; `make test-others` does it with other releases.
"""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from checkpoints import contents, write_source
from click.testing import CliRunner
from command_line import run
from hub_server import Hub
from load_lines import KINDS, TOKEN, allows, jobs_of, loads, quantize, run_all, write_reference

from nf4conv.cli import main
from nf4conv.plan.writing import NO_CONFIG
from nf4conv.report.loading import push_command

pytestmark = pytest.mark.oracle


@pytest.mark.usefixtures("hub")
def test_code_that_loads_runs_as_it_is_printed(tmp_path: Path):
    outputs = {}
    for name, kind in KINDS.items():
        if not kind.needs:
            outputs[name] = quantize(kind, tmp_path / name)
            write_reference(outputs[name])
    jobs = [job for output in outputs.values() for job in jobs_of(output)]
    answers = run_all(jobs, sys.executable, tmp_path / "cache")
    assert [answer for answer in answers if not loads(answer)] == []
    assert all(" in bfloat16, " in answer for answer in answers)
    for name, output in outputs.items():
        assert output.card_install == output.lines["install"]
        assert allows(output.card_install, transformers.__version__), name
    assert '"me/pushed"' in outputs["pushed"].lines["load"]
    assert '"me/pushed"' in outputs["pushed"].card
    assert "push" not in outputs["pushed"].lines


@pytest.mark.skipif(not find_spec("sentence_transformers"), reason="needs sentence-transformers")
def test_code_that_loads_a_sentence_encoder(tmp_path: Path):
    output = quantize(KINDS["sentence encoder"], tmp_path / "kind")
    answers = run_all(jobs_of(output), sys.executable, tmp_path / "cache")
    assert all(loads(answer) for answer in answers), answers


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
    output = quantize(replace(KINDS["plain"], make=write_source), folder)
    run_push(output.lines["push"], folder)
    pushed = dict(hub.repos["me/out"].files)
    del pushed[".gitattributes"]
    assert pushed == contents(folder / "out")


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("Llama-3.1-8B_nf4", "Llama-3.1-8B_nf4"),
        ("a b(c)", "a-b-c"),
        ("a--b..c", "a-b.c"),
        (".hidden-", "hidden"),
        ("模型", "model"),
        ("x" * 200, "x" * 80),
        ("model.git", "model"),
    ],
)
def test_the_repository_has_a_name_that_the_hub_takes(tmp_path: Path, name: str, repo: str):
    from huggingface_hub.utils import validate_repo_id

    found = shlex.split(push_command(tmp_path / name))[2]
    assert found == f"YOUR_NAME/{repo}"
    validate_repo_id(found)


def test_a_card_that_was_made_before_it_was_pushed_names_the_repository(tmp_path: Path, hub: Hub):
    kind = KINDS["plain"]
    output = quantize(kind, tmp_path / "kind")
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


def test_without_config_json_a_note_says_so_and_nothing_is_pushed(tmp_path: Path):
    source = write_source(tmp_path / "source")
    (source / "config.json").unlink()
    arguments = ["quantize", str(source), str(tmp_path / "out")]
    planned = run(*arguments, "--dry-run")
    assert f"Note: {NO_CONFIG}" in planned.stdout.splitlines()
    done = run(*arguments, "--device", "cpu")
    assert f"Note: {NO_CONFIG}" in done.stderr.splitlines()
    assert f"Note: {NO_CONFIG}" in done.stdout.splitlines()
    assert not [line for line in done.stdout.splitlines() if line.startswith(("push:", "load:"))]
