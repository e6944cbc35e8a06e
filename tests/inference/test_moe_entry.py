"""How the loader gets into transformers: by bitsandbytes' entry point, before or after it is
imported, or by `import nf4conv.inference.moe`; and when it stays out.
"""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nf4conv.errors import CodecError
from nf4conv.inference.moe import entry
from nf4conv.inference.moe.loading import checkpoints

ROOT = Path(__file__).parents[2]


def install(folder: Path) -> Path:
    """Writes what pip would write of nf4conv beside its code: its entry points."""
    project = (ROOT / "pyproject.toml").read_text()
    found = re.search(
        r'^\[project\.entry-points\."(.+)"\].*\n(\w+) = "(.+)"$', project, re.MULTILINE
    )
    assert found
    group, name, value = found.groups()
    info = folder / "nf4conv-999.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nf4conv\nVersion: 999\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return folder


def run(program: str, *paths: Path, **environment: str) -> str:
    """Runs a program in a Python of its own; returns what it printed, with stderr."""
    path = os.pathsep.join(map(str, [*paths, ROOT, ROOT / "tests" / "helpers"]))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# ---------------------------------------------------------------------- the real libraries

LOAD = """
import sys
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else FOLDER)
kinds = {type(parameter).__name__ for parameter in model.parameters()}
print("packed" if "Experts4bit" in kinds else "not packed")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    pytest.importorskip("transformers", minversion="5.8")
    from packed_experts import load, make_mixture, pack_one_by_one, skip_linear_layers

    folder = tmp_path_factory.mktemp("checkpoint")
    source = make_mixture("qwen3_moe", folder / "source")
    pack_one_by_one("qwen3_moe", source, folder / "packed")
    skip_linear_layers(folder / "packed", load(source))
    return folder / "packed"


@pytest.mark.oracle
@pytest.mark.parametrize("first", ["import bitsandbytes", "import transformers.modeling_utils"])
def test_loads_with_nothing_imported_of_ours(first, checkpoint, tmp_path):
    program = f"{first}\nfrom transformers import AutoModelForCausalLM\nFOLDER={str(checkpoint)!r}"
    shown = run(program + LOAD, install(tmp_path))
    assert shown.splitlines()[-1] == "packed"
    assert shown.count("nf4conv keeps 4 parameters of experts in 4 bits") == 1


# ---------------------------------------------------------------------- fakes, which are fast


def write_fakes(folder: Path, version: str = "5.23.0") -> Path:
    """Writes a bitsandbytes and a transformers that have only what the loader looks for."""
    (folder / "bitsandbytes").mkdir(parents=True)
    (folder / "bitsandbytes/__init__.py").write_text(
        "from importlib.metadata import entry_points\n"
        "for entry in entry_points(group='bitsandbytes.backends'):\n    entry.load()()\n"
    )
    quantizers = folder / "transformers/quantizers"
    quantizers.mkdir(parents=True)
    (folder / "transformers/__init__.py").write_text(f"__version__ = {version!r}\n")
    (quantizers / "__init__.py").write_text("")
    names = [name.rpartition(".")[2] for name in checkpoints.HOOKS[checkpoints.QUANTIZER]]
    methods = "".join(f"    def {name}(self, *args, **kwargs): ...\n" for name in names)
    (quantizers / "quantizer_bnb_4bit.py").write_text(f"class Bnb4BitHfQuantizer:\n{methods}")
    return install(folder)


# transformers goes on with importing its other quantizers
QUANTIZER = (
    "from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer as Q\n"
    "import colorsys\n"
)
PATCHED = "import sys; print('patched' if '_nf4conv' in vars(Q) else 'untouched')\n"
NOTHING_HEAVY = "assert not {'torch', 'numpy', 'safetensors', 'huggingface_hub'} & {*sys.modules}\n"
ORDERS = {
    "bitsandbytes first": "import bitsandbytes\n" + QUANTIZER,
    "transformers first": QUANTIZER + "import bitsandbytes\n",
    "by the documented line": "import nf4conv.inference.moe\n" + QUANTIZER,
    "all of them": "import bitsandbytes, nf4conv.inference.moe\n"
    + QUANTIZER
    + "import nf4conv.inference.moe.loading.checkpoints\n",
}


@pytest.mark.parametrize("order", ORDERS)
def test_patches_without_importing_anything_heavy(order, tmp_path):
    shown = run(ORDERS[order] + PATCHED + NOTHING_HEAVY, write_fakes(tmp_path))
    assert shown == "patched\n"


def test_waits_while_the_quantizer_is_half_imported(tmp_path):
    """As in transformers 5.8, whose quantizer imports what imports bitsandbytes."""
    fakes = write_fakes(tmp_path)
    module = fakes / "transformers/quantizers/quantizer_bnb_4bit.py"
    module.write_text("import bitsandbytes\n" + module.read_text())
    shown = run(QUANTIZER + PATCHED, fakes)
    assert shown == "patched\n"


@pytest.mark.parametrize("value", ["0", "off"])
def test_is_switched_off(value, tmp_path):
    program = ORDERS["all of them"] + PATCHED
    assert run(program, write_fakes(tmp_path), NF4CONV_MOE=value) == "untouched\n"


@pytest.mark.parametrize(("version", "shown"), [("4.57.6", "untouched"), ("5.99.0", "patched")])
def test_transformers_4_is_left_alone_and_any_other_is_tried(version, shown, tmp_path):
    program = ORDERS["bitsandbytes first"] + PATCHED
    assert run(program, write_fakes(tmp_path, version)) == f"{shown}\n"


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("", "has no attribute 'param_element_size'"),
        ("    def param_element_size(self): ...\n", "too many positional arguments"),
    ],
)
def test_what_does_not_fit_is_told_once_and_left_alone(method, reason, tmp_path):
    fakes = write_fakes(tmp_path, "5.99.0")
    module = fakes / "transformers/quantizers/quantizer_bnb_4bit.py"
    whole = "    def param_element_size(self, *args, **kwargs): ...\n"
    module.write_text(module.read_text().replace(whole, method))
    program = (
        ORDERS["all of them"]
        + "print(hasattr(Q.get_state_dict_and_metadata, '__wrapped__'))"
        + "; import nf4conv.inference.moe.entry as e; e.activate()"
    )
    shown = run(program, fakes)
    assert shown.count("nf4conv does not load 4-bit experts here") == 1
    assert "param_element_size of transformers 5.99.0 does not fit" in shown
    assert reason in shown
    assert "False" in shown


@pytest.mark.oracle
def test_what_does_not_fit_while_loading_is_told_in_a_line(checkpoint, monkeypatch):
    from transformers import AutoModelForCausalLM, core_model_loading

    monkeypatch.setattr(core_model_loading, "rename_source_key", lambda key: key)
    with pytest.raises(
        CodecError, match=r"rename_source_key of transformers .* works with"
    ) as told:
        AutoModelForCausalLM.from_pretrained(checkpoint)
    assert "\n" not in str(told.value)


def test_nothing_is_raised(monkeypatch, caplog):
    def broken() -> bool:
        raise RuntimeError("something")

    monkeypatch.setattr(entry, "_patch_if_there", broken)
    monkeypatch.setattr(sys, "meta_path", [])
    with caplog.at_level(logging.WARNING, logger="nf4conv"):
        entry.activate()
    assert "nf4conv is not active: RuntimeError: something" in caplog.text


@pytest.mark.oracle
def test_stands_back_for_unsloth(checkpoint, monkeypatch):
    from packed_experts import load

    files = [str(file) for file in checkpoint.glob("*.safetensors")]
    model = load(checkpoint.with_name("source"))
    assert checkpoints.look_at_packed(model, files, None) is not None
    monkeypatch.setitem(sys.modules, "unsloth", sys)
    assert checkpoints.look_at_packed(model, files, None) is None


# ---------------------------------------------------------------------- what `nf4conv env` says


def status(fakes: Path, **environment: str) -> str:
    return run(
        "from nf4conv.inference.moe import status; print(status())", fakes, **environment
    ).strip()


def test_status(tmp_path):
    def fake_version(version: str) -> Path:
        folder = write_fakes(tmp_path / version, version)
        info = folder / f"transformers-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: transformers\nVersion: {version}\n")
        return folder

    known = fake_version("5.23.0")
    assert status(known) == "active for transformers 5.23.0; known to work with 5.8 to 5.24"
    assert status(known, NF4CONV_MOE="0") == "off: NF4CONV_MOE=0"
    assert status(fake_version("4.57.6")).startswith("not needed: transformers 4.57.6")
