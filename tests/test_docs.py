"""Documents that are made from the code say what the code says."""

import re
import sys
from pathlib import Path

import click
import pytest

from nf4conv.cli import main

DOCS = Path(__file__).parents[1] / "docs"
sys.path.append(str(DOCS))

import generate  # noqa: E402 - from docs/


@pytest.mark.parametrize("name", ["options.md", "json.md"])
def test_what_is_generated_is_up_to_date(name):
    assert (DOCS / name).read_text(encoding="utf-8") == generate.pages()[name], "run: make docs"


def test_every_option_is_documented():
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## nf4conv (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == main.commands.keys()
    for name, command in main.commands.items():
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        missing = [spelling for option in options for spelling in option.opts if f"{spelling}" not in sections[name]]
        assert not missing, name
