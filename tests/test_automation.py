"""What docs/automation and the workflows hold runs: their commands against the loopback Hub."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from checkpoints import contents, write_source
from hub_server import Hub, Repo
from test_package import build, install_backend

import nf4conv

ROOT = Path(__file__).parents[1]
AUTOMATION = ROOT / "docs" / "automation"
ON_TAG = AUTOMATION / "quantize-on-tag.yml"
WORKFLOWS = [*sorted((ROOT / ".github" / "workflows").glob("*.yml")), ON_TAG]
MODEL = "me/model"
TOKEN = "hf_writer"


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    """Returns the steps of all jobs of a workflow."""
    return [step for job in load(path)["jobs"].values() for step in job["steps"]]


def script(path: Path, name: str) -> str:
    """Returns what the step with this name runs."""
    [found] = [step["run"] for step in steps(path) if step.get("name") == name]
    return found


def bash(text: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as GitHub does."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


# --- workflows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_scripts_parse_and_foreign_actions_are_pinned(path: Path):
    for step in steps(path):
        if "run" in step:
            text = re.sub(r"\$\{\{.*?\}\}", "x", step["run"])
            assert subprocess.run(["bash", "-n", "-c", text], check=False).returncode == 0
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]


def release(folder: Path, tag: str, *, owner: str = "us") -> subprocess.CompletedProcess[str]:
    """Runs the release's first check in a tree of version 1.2.3."""
    (folder / "nf4conv").mkdir()
    (folder / "nf4conv" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 – today\n")
    (folder / "pyproject.toml").write_text(f'repository = "https://github.com/{owner}/nf4conv"\n')
    check = script(
        ROOT / ".github/workflows/release.yml", "Compare the tag with the version and the changelog"
    )
    return bash(check, folder, GITHUB_REF_NAME=tag)


def test_a_release_needs_the_tag_of_its_version(tmp_path: Path):
    for name in ("right", "wrong", "nobody"):
        (tmp_path / name).mkdir()
    assert release(tmp_path / "right", "v1.2.3").returncode == 0
    wrong = release(tmp_path / "wrong", "v1.2.4")
    assert (wrong.returncode, wrong.stdout) == (1, "tag v1.2.4, version 1.2.3\n")
    nobody = release(tmp_path / "nobody", "v1.2.3", owner="OWNER")
    assert nobody.returncode == 1
    assert "put the owner in place of OWNER" in nobody.stdout


def test_the_action_quantizes_and_pushes_what_a_tag_names(hub: Hub, tmp_path: Path):
    hub.repos[MODEL] = Repo()
    revision = hub.repos[MODEL].commit(contents(write_source(tmp_path / "source")))
    hub.repos[MODEL].commit({"config.json": b"not what the tag names"})
    variables = {
        "SOURCE": MODEL,
        "TARGET": "me/model-nf4",
        "REVISION": revision,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "cache"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }
    assert load(ON_TAG)["jobs"]["quantize"]["env"].keys() <= variables.keys()
    done = bash(script(ON_TAG, "Quantize, verify and push"), tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    pushed = dict(hub.repos["me/model-nf4"].files)
    del pushed[".gitattributes"]
    assert pushed == contents(tmp_path / "out")
    said = bash(script(ON_TAG, "Say what was made"), tmp_path, **variables)
    assert said.returncode == 0, said.stderr
    assert re.fullmatch(
        rf"\[0\.\d MB\]\({hub.url}/me/model-nf4/commit/\w+\)\n", (tmp_path / "summary").read_text()
    )
    # a second tag replaces the model
    again = bash(script(ON_TAG, "Quantize, verify and push"), tmp_path, **variables)
    assert again.returncode == 0, again.stderr


# --- the image ------------------------------------------------------------------------------------


def test_the_image_is_the_one_that_the_job_files_run():
    dockerfile = (AUTOMATION / "Dockerfile").read_text(encoding="utf-8")
    image = f"registry.example/nf4conv:{nf4conv.__version__}"
    assert f"--tag {image} ." in dockerfile
    cluster = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert set(re.findall(r"image: (\S+)", cluster)) == {image}


def test_what_the_image_copies_is_enough_to_install(tmp_path: Path):
    dockerfile = (AUTOMATION / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE):
        *names, target = line.split()
        folder = tmp_path / "root" / target.lstrip("/")
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder)
    install_backend(tmp_path / "backend")
    wheel = build("build_wheel", tmp_path / "root" / "opt" / "nf4conv", tmp_path)
    assert wheel.stat().st_size > 100_000


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the page, which shows a line each tenth of a second."""
    spec = importlib.util.spec_from_file_location("space_app", AUTOMATION / "space" / "app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.1)
    return module


@pytest.fixture
def model(hub: Hub, tmp_path: Path) -> dict[str, bytes]:
    """The files of a public model on the Hub."""
    files = contents(write_source(tmp_path / "source"))
    hub.repos[MODEL] = Repo()
    hub.repos[MODEL].commit(files)
    return files


def test_the_page_opens_a_pull_request(app: ModuleType, hub: Hub, model: dict[str, bytes]):
    lines = list(app.convert(f" {MODEL} ", "", TOKEN, "search"))
    assert lines[0] == f"reading the headers of {MODEL} …"
    assert re.fullmatch(
        r"\*\*Done\.\*\* 0\.9 MB → 0\.\d MB, every value checked: "
        rf"\[pull request\]\({hub.url}/{MODEL}/discussions/1\)",
        lines[-1],
    )
    assert hub.repos[MODEL].files == model
    [proposed] = hub.repos[MODEL].pull_requests
    assert (
        json.loads(proposed["config.json"])["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    )
    assert '"search"' in proposed["nf4conv.json"].decode()


@pytest.mark.usefixtures("model")
def test_the_page_takes_another_repository_for_the_result(app: ModuleType, hub: Hub):
    hub.repos["me/4-bit"] = Repo(token=TOKEN, private=True)
    hub.repos["me/4-bit"].commit({})
    lines = list(app.convert(MODEL, "me/4-bit", TOKEN, "absmax"))
    assert f"{hub.url}/me/4-bit/discussions/1" in lines[-1]
    assert not hub.repos[MODEL].pull_requests


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("repository", "target", "token", "said"),
    [
        ("", "", TOKEN, "Please name a repository"),
        (MODEL, "", " ", "give a token"),
        ("tests", "", TOKEN, "please name a model on the Hub"),
        ("me/none", "", TOKEN, "**Failed.**"),
        ("not a name", "", TOKEN, "**Failed.**"),
        (MODEL, "me/none", TOKEN, "**Failed.**"),
    ],
)
def test_the_page_says_what_is_wrong(
    app: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    repository: str,
    target: str,
    token: str,
    said: str,
):
    monkeypatch.chdir(ROOT)
    lines = list(app.convert(repository, target, token, "search"))
    assert said in lines[-1]
    assert TOKEN not in "".join(lines)


@pytest.mark.usefixtures("model")
def test_the_page_refuses_what_is_too_large(
    app: ModuleType, hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(app, "MOST_GIGABYTES", 0.0001)
    assert list(app.convert(MODEL, "", TOKEN, "search"))[-1].startswith("**Too large.**")
    assert hub.count("PUT /upload/") == 0


def test_the_space_asks_for_one_release_of_gradio():
    readme = (AUTOMATION / "space" / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(readme.split("---")[1])
    required = (AUTOMATION / "space" / "requirements.txt").read_text(encoding="utf-8").split()
    assert required == [f"gradio=={front['sdk_version']}", "nf4conv"]
    assert (AUTOMATION / "space" / front["app_file"]).exists()


@pytest.mark.usefixtures("model")
def test_the_page_in_gradio(app: ModuleType, hub: Hub):
    """A client presses the button of the running page; `make test-space` installs gradio."""
    pytest.importorskip("gradio")
    from gradio_client import Client

    page = app.page()
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    try:
        said = Client(address, verbose=False).predict(
            MODEL, "", TOKEN, "search", api_name="/convert"
        )
        assert f"{hub.url}/{MODEL}/discussions/1" in said
    finally:
        page.close()
