"""Builds the source distribution and the wheel, and checks what is in them."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BUILD = "import sys, hatchling.build as build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


@dataclass(frozen=True)
class Built:
    """Both distributions: the paths in them, and their metadata."""

    sdist_files: set[str]
    wheel_files: set[str]
    sdist_metadata: Message
    wheel_metadata: Message
    entry_points: tuple[EntryPoint, ...]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Builds the wheel from the source distribution, as pip does for users without a wheel."""
    folder = tmp_path_factory.mktemp("built")
    install_backend(folder / "backend")
    sdist = build("build_sdist", ROOT, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = sdist.with_name(sdist.name.removesuffix(".tar.gz"))
    wheel = build("build_wheel", unpacked, folder)
    with zipfile.ZipFile(wheel) as archive:
        wheel_files = set(archive.namelist())
        [path] = [name for name in wheel_files if name.endswith(".dist-info/METADATA")]
        wheel_metadata = archive.read(path).decode()
    [distribution] = distributions(path=[str(wheel)])
    return Built(
        sdist_files=files_below(unpacked),
        wheel_files=wheel_files,
        sdist_metadata=message_from_string((unpacked / "PKG-INFO").read_text(encoding="utf-8")),
        wheel_metadata=message_from_string(wheel_metadata),
        entry_points=tuple(distribution.entry_points),
    )


def install_backend(folder: Path) -> None:
    """Installs what [build-system] requires into a folder, as pip does before it builds."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = re.search(r"^requires = \[(.*)\]$", text, re.MULTILINE)
    assert required
    names = re.findall(r'"([^"]+)"', required[1])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *names]
    subprocess.run(pip, check=True)


def build(hook: str, source: Path, folder: Path) -> Path:
    """Calls a hook of the build backend in the source folder; returns the file that it made."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "backend")}
    command = [sys.executable, "-c", BUILD, hook, str(folder)]
    done = subprocess.run(
        command, cwd=source, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return folder / done.stdout.split()[-1]


def files_below(folder: Path) -> set[str]:
    """Returns the paths of all files below a folder, except caches of tools."""
    found = set()
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        is_cache = any(part.startswith((".", "__pycache__")) for part in relative.parts)
        if path.is_file() and not is_cache:
            found.add(str(relative))
    return found


def test_the_wheel_holds_the_whole_package_and_nothing_else(built: Built):
    in_wheel = {name for name in built.wheel_files if ".dist-info/" not in name}
    assert in_wheel == {f"nf4conv/{path}" for path in files_below(ROOT / "nf4conv")}
    assert {"nf4conv/py.typed", "nf4conv/report/page.html.jinja"} <= in_wheel


def test_bitsandbytes_finds_the_loader_of_experts(built: Built):
    assert [entry for entry in built.entry_points if entry.group == "bitsandbytes.backends"] == [
        EntryPoint("nf4conv", "nf4conv.inference.moe.entry:activate", "bitsandbytes.backends")
    ]


def test_the_source_distribution_holds_what_its_tests_need(built: Built):
    for folder in ("nf4conv", "tests", "docs", "benchmarks"):
        assert {f"{folder}/{path}" for path in files_below(ROOT / folder)} <= built.sdist_files
    for name in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "LICENSE",
        "Makefile",
    ):
        assert name in built.sdist_files
    assert {"pyproject.toml", "hatch_build.py"} <= built.sdist_files


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_the_package_index_gets_absolute_links(built: Built, kind: str):
    metadata = built.sdist_metadata if kind == "sdist" else built.wheel_metadata
    repository = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))["Homepage"]
    in_repository = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    on_index = LINK.findall(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert len(on_index) == len(in_repository) > 20
    for link, shown in zip(in_repository, on_index, strict=True):
        if link.startswith(("https:", "#")):
            assert shown == link
            continue
        view = "raw" if link.endswith(".svg") else "blob"
        assert shown == f"{repository}/{view}/main/{link}"


def test_the_repository_has_one_place_for_its_address():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(pages) > 10
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "/nf4conv/blob/" not in text, page.name
        assert "/nf4conv/raw/" not in text, page.name
    build_settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert build_settings.count("https://github.com/") == 1
