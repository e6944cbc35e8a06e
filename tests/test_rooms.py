"""The house stays readable: every room has a map of its modules, none is crowded, no line is long.

tests/test_layering.py holds which room may import which.
"""

import ast
import re
from pathlib import Path

import pytest

import nf4conv

PACKAGE = Path(nf4conv.__file__).parent
ROOMS = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
MOST_MODULES = 14
COLUMNS = 100

# a line of a map: one name or several, two spaces or more, and what is there
MAP_LINE = re.compile(r" *((?:\w+(?:\.py|/), )*\w+(?:\.py|/)) {2,}\S")


def name_of(room: Path) -> str:
    return str(room.relative_to(PACKAGE.parent))


def modules_of(room: Path) -> set[str]:
    """Returns the modules and the rooms in a room, as its map names them."""
    found = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    for inner in room.glob("*/__init__.py"):
        found.add(f"{inner.parent.name}/")
    return found


@pytest.mark.parametrize("room", [room for room in ROOMS if room != PACKAGE], ids=name_of)
def test_a_room_has_a_map_of_its_modules(room: Path):
    """The package's own docstring is for users. The map of its rooms is in CONTRIBUTING.md."""
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    named: list[str] = []
    for line in docstring.splitlines():
        found = MAP_LINE.match(line)
        if found:
            named += found[1].split(", ")
    assert sorted(named) == sorted(modules_of(room))


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_no_room_is_crowded(room: Path):
    modules = [name for name in modules_of(room) if name.endswith(".py")]
    assert len(modules) <= MOST_MODULES


def test_no_line_is_long():
    long = []
    for path in (*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            written = line.partition("  # type: ignore")[0]
            if len(written) > COLUMNS:
                long.append(f"{path.relative_to(PACKAGE)}:{number}")
    assert not long
