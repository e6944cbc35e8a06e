"""The rooms of the house: who may import whom, and what an import costs."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nf4conv
from nf4conv.run.device.on_driver import kernels

PACKAGE = Path(nf4conv.__file__).parent

# from the bottom to the top: a room may import those before it
ORDER = (
    "version",
    "errors",
    "system",
    "format",
    "declaring",
    "options",
    "models",
    "sources",
    "choose",
    "plan",
    "output",
    "check",
    "report",
    "run",
    "calibrate",
    "commands",
)

# the rooms and modules that each room may import besides itself; imports for types alone, and
# delayed ones, count too
ROOMS = {room: {*ORDER[:place]} for place, room in enumerate(ORDER)}
ROOMS["run"].add("codec")
ROOMS["calibrate"].add("codec")
ROOMS["commands"].add("codec")
ROOMS["codec"] = {"errors", "format", "system"}
ROOMS["inference"] = {"codec", "errors", "format", "system"}
ROOMS["commands"].add("inference")
ROOMS["cli"] = {"errors", "declaring", "options", "plan", "system", "commands"}
ROOMS["cli"] |= {"report.text", "report.as_json"}
ROOMS["__main__"] = {"cli", "system"}

# what the converter imports of each wing, late
DOORS = {
    "inference": ("commands.environment", "nf4conv.inference.moe.entry.status"),
    "calibrate": ("commands.planning", "nf4conv.calibrate.request.plan_calibrated"),
}

# libraries that only the named modules may import
ORACLES = {
    "bitsandbytes": (
        "commands.evaluate",
        "inference.moe.loading.operations",
    ),
    "transformers": (
        "commands.evaluate",
        "inference.moe.forward",
        "inference.moe.loading.converters",
        "inference.moe.loading.checkpoints",
        "inference.moe.loading.operations",
        "calibrate.model.building",
        "calibrate.model.filling",
    ),
    "ray": ("commands.spread",),
}

# libraries that take long to import, and the modules of rooms without them that import one
HEAVY = {"torch", "triton", "numpy", "transformers", "bitsandbytes"}
WITHOUT_HEAVY = (*ORDER[: ORDER.index("run") + 1], "cli")
WITH_TORCH = "run.device.on_torch"
EXCEPT = {
    "sources.pickle_header": "lets torch read pickles",
    "sources.reader": "reads arrays of numpy",
    "output.digest": "sums words by numpy",
    "run.device.on_driver.kernels": "compiles with torch, once",
    "run.tasks.diagnose": "says by torch how tensors differ",
}

# modules that Windows lacks or has alone, and what not every system has of others; only the room
# `system` names them
OF_SOME_SYSTEMS = {"fcntl", "msvcrt", "pwd", "resource", "signal", "termios", "winreg"}
CALLS_OF_SOME_SYSTEMS = {
    "CDLL", "WinDLL", "dup2", "fork", "fsync", "geteuid", "getrusage", "getuid", "posix_fadvise",
    "pread", "preadv", "pwrite", "pwritev", "sched_getaffinity", "sched_setaffinity", "sysconf",
}  # fmt: skip
VALUES_OF_SOME_SYSTEMS = {"st_blocks", "st_gid", "st_uid", "windll"}
FILES_OF_SOME_SYSTEMS = ("/dev/", "/proc/", "/sys/")


def name_of(file: Path) -> str:
    """Returns a module's name without that of the package."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


@cache
def nodes(file: Path) -> list[ast.AST]:
    """Returns all nodes of a module. Many tests look at every module."""
    return list(ast.walk(ast.parse(file.read_text())))


def imports(file: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Yields the name of everything that a file imports, or may import, with the statement."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield str(node.module), node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


@cache
def own(file: Path) -> dict[str, ast.stmt]:
    """Returns the modules of ours that a file imports, with the statements."""
    found = {}
    for name, node in imports(file):
        module = name.removeprefix("nf4conv.")
        if module != name and module in MODULES and module != name_of(file):
            found[module] = node
    return found


def is_in(name: str, room: str) -> bool:
    """Returns whether a module is a room's, or the room itself."""
    return name == room or name.startswith(f"{room}.")


def libraries(file: Path) -> set[str]:
    return {name.partition(".")[0] for name, _ in imports(file)} - {"nf4conv"}


def test_there_is_no_circle():
    TopologicalSorter({name: own(file).keys() for name, file in MODULES.items() if name}).prepare()


def test_a_room_knows_only_what_is_below_it():
    wrong = []
    for name, file in MODULES.items():
        room = name.partition(".")[0]
        allowed = (room, *ROOMS.get(room, ()))
        above = [one for one in own(file) if not any(is_in(one, place) for place in allowed)]
        if name and above:
            wrong.append(f"{name} imports {above}")
    assert not wrong


def test_only_the_command_line_imports_the_package_above_the_rooms():
    """Rooms import from each other: `from nf4conv import __version__` would be an arrow upwards."""
    found = set()
    for name, file in MODULES.items():
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom) and node.module == "nf4conv":
                found |= {(name, each.name) for each in node.names if each.name not in ROOMS}
            if isinstance(node, ast.Import) and not name.startswith("cli."):
                found |= {(name, each.name) for each in node.names if each.name == "nf4conv"}
    assert not found


def test_each_wing_has_one_door():
    """`nf4conv.__init__` only names the modules of public functions."""
    found = {wing: set() for wing in DOORS}
    for name in [name for name in MODULES if name]:
        for imported, node in imports(MODULES[name]):
            wing = imported.removeprefix("nf4conv.").partition(".")[0]
            if wing in DOORS and not is_in(name, wing):
                assert node.col_offset > 0, f"{name} imports {imported} when it is imported"
                found[wing].add((name, imported))
    for wing, (name, door) in DOORS.items():
        assert found[wing] == {(name, door), (name, door.rpartition(".")[0])}


def test_the_converter_runs_without_the_wings(tmp_path):
    from checkpoints import write_source

    shutil.copytree(PACKAGE, tmp_path / "nf4conv")
    for wing in DOORS:
        shutil.rmtree(tmp_path / "nf4conv" / wing)
    write_source(tmp_path / "source")
    program = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport nf4conv\n"
        f"assert nf4conv.__file__.startswith({str(tmp_path)!r})\n"
        "nf4conv.quantize('source', 'packed', device='cpu')\n"
        "nf4conv.dequantize('packed', 'decoded', device='cpu')\n"
        "assert nf4conv.verify('packed', source='source', device='cpu').passed\n"
        "assert 'no nf4conv.inference' in nf4conv.environment().values['4-bit experts']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def unexplained(name: str) -> Iterator[str]:
    """Yields the modules that one imports late without a comment or its docstring saying why."""
    file = MODULES[name]
    text = file.read_text()
    lines = text.splitlines()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    if "importing torch takes seconds" in " ".join(docstring.split()):
        return
    for found, node in own(file).items():
        is_delayed = node.col_offset > 0
        is_for_types = "TYPE_CHECKING" in "".join(lines[node.lineno - 8 : node.lineno])
        comment = "".join(lines[node.lineno - 1 : node.end_lineno]).partition("#")[2]
        if is_delayed and not is_for_types and "import" not in comment:
            yield f"{name}: {found} is imported late, but nothing says why"


def test_a_delayed_import_says_why():
    """Importing torch, YAML or the Hub's client is slow."""
    assert not [line for name in MODULES if name for line in unexplained(name)]


def test_every_module_is_used_by_another():
    """It is imported, or named in a text for who imports it when it is needed."""
    imported = {name for file in MODULES.values() for name in own(file)}
    text = "\n".join(file.read_text() for file in MODULES.values())
    unused = []
    for name in MODULES.keys() - imported - {"", "__main__"}:
        is_folder = MODULES[name].name == "__init__.py"
        if not is_folder and f"nf4conv.{name}:" not in text and f'{name}"' not in text:
            unused.append(name)
    assert not unused


def test_what_libraries_a_module_may_know():
    wrong = []
    for name, file in MODULES.items():
        found = libraries(file)
        for library, places in ORACLES.items():
            if library in found and name not in places:
                wrong.append(f"{name} imports {library}")
        is_light = any(is_in(name, room) for room in WITHOUT_HEAVY) and not is_in(name, WITH_TORCH)
        if is_light and name not in EXCEPT and found & HEAVY:
            wrong.append(f"{name} imports {found & HEAVY}")
    assert not wrong


def parts_of_some_systems(file: Path) -> set[str]:
    """Returns what a file names that not every operating system has."""
    found = libraries(file) & OF_SOME_SYSTEMS
    for node in nodes(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found |= {node.func.attr} & CALLS_OF_SOME_SYSTEMS
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & VALUES_OF_SOME_SYSTEMS
            if node.attr.startswith("O_") and node.attr != "O_RDONLY":
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(FILES_OF_SOME_SYSTEMS):
            found.add(str(node.value))
    return found


def test_only_one_room_knows_how_operating_systems_differ():
    others = {name: file for name, file in MODULES.items() if not is_in(name, "system")}
    found = {name: parts_of_some_systems(file) for name, file in others.items()}
    assert not {name: parts for name, parts in found.items() if parts}


def test_the_command_line_calls_public_names_only():
    used = set()
    for name, file in MODULES.items():
        for node in nodes(file) if is_in(name, "cli") else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "nf4conv":
                used.add(node.attr)
    assert used - {"__version__"} <= {*nf4conv.__all__}


def test_what_kernels_are_made_of_decides_their_key_in_the_cache():
    reached: set[str] = set()
    ahead = {name for name in MODULES if name.startswith("codec.kernels.")}
    while ahead:
        reached |= ahead
        ahead = {other for name in ahead for other in own(MODULES[name])} - reached
    outside = {name for name in reached if MODULES[name] not in kernels.deciding_sources()}
    # texts of errors are in no kernel, nor is the way by which the system is asked to compile it
    assert {name for name in outside if not is_in(name, "system")} <= {"errors"}


@pytest.mark.parametrize(
    "program",
    [
        "import nf4conv",
        "import nf4conv.cli",
        "import nf4conv.commands.quantize",
        "import nf4conv.run.checkpoint",
        "from nf4conv.cli import main; main(['--help'], standalone_mode=False)",
        "from nf4conv.cli import main; main(['quantize', '--help'], standalone_mode=False)",
    ],
)
def test_torch_is_not_imported_for_it(program):
    check = (
        f"{program}\nimport sys\nassert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
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
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "12 weights packed" in done.stdout


def test_public_names_exist_and_are_sorted():
    assert nf4conv.__all__ == sorted(nf4conv.__all__)
    assert all(getattr(nf4conv, name) is not None for name in nf4conv.__all__)
    assert {*nf4conv.__all__} <= {*dir(nf4conv)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        nf4conv.nothing  # noqa: B018
