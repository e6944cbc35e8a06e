"""The two halves of the package and their join: who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nf4conv

PACKAGE = Path(nf4conv.__file__).parent
TORCH_FREE_CODEC = {"nf4conv.codec", "nf4conv.codec.codebook", "nf4conv.codec.layout", "nf4conv.codec.mean_order"}


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


@pytest.mark.parametrize("file", modules("checkpoint"), ids=lambda file: file.stem)
def test_files_know_no_tensors(file):
    found = list(imports(file))
    assert not [name for name in found if name.split(".")[0] in ("torch", "triton", "numpy", "transformers")]
    own = {name for name in found if name.startswith("nf4conv.")}
    allowed = ("nf4conv.checkpoint", "nf4conv.errors", "nf4conv.options", *TORCH_FREE_CODEC)
    assert not [name for name in own if not name.startswith(allowed)]


@pytest.mark.parametrize("file", modules("codec"), ids=lambda file: file.stem)
def test_tensors_know_no_files(file):
    own = {name for name in imports(file) if name.startswith("nf4conv.")}
    assert not [name for name in own if not name.startswith(("nf4conv.codec", "nf4conv.errors"))]


@pytest.mark.parametrize("file", modules("."), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_imports_the_command_line_or_an_oracle(file):
    found = set(imports(file))
    assert file.name == "__main__.py" or not [name for name in found if name.startswith("nf4conv.cli")]
    assert not [name for name in found if name.split(".")[0] == "bitsandbytes"]
    assert file.name == "skeleton.py" or not [name for name in found if name.split(".")[0] == "transformers"]


@pytest.mark.parametrize(
    "program",
    [
        "import nf4conv",
        "import nf4conv.cli",
        "import nf4conv.quantize",
        "import nf4conv.cuda.encode",
        "from nf4conv.cli import main; main(['--help'], standalone_mode=False)",
        "from nf4conv.cli import main; main(['quantize', '--help'], standalone_mode=False)",
    ],
)
def test_torch_is_not_imported_for_it(program):
    check = f"{program}\nimport sys\nassert 'torch' not in sys.modules and 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


def test_a_dry_run_needs_no_torch(tmp_path):
    """Unless transformers is there to be asked for its opinion."""
    from checkpoints import write_source

    source = write_source(tmp_path / "source")
    program = (
        "import sys\nsys.modules['transformers'] = None\nfrom nf4conv.cli import main\n"
        f"main(['quantize', {str(source)!r}, 'out', '--dry-run'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "12 weights packed" in done.stdout


def test_public_names_exist_and_are_sorted():
    assert nf4conv.__all__ == sorted(nf4conv.__all__)
    assert all(getattr(nf4conv, name) is not None for name in nf4conv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        nf4conv.nothing  # noqa: B018
