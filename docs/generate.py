"""Writes docs/options.md from the command line and from the docstrings of the classes of results.

tests/test_docs.py fails if the page is not what this writes.

Usage: python docs/generate.py
"""

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import click

import nf4conv
from nf4conv.cli import main
from nf4conv.cli.parameters import grouped
from nf4conv.declaring import Checked
from nf4conv.options import VerifyOptions
from nf4conv.report.as_json import SCHEMA_VERSION
from nf4conv.report.results import PlanReport

HERE: Final = Path(__file__).parent
RESULTS: Final = {
    PlanReport: "`quantize --dry-run`, `dequantize --dry-run`",
    nf4conv.RunReport: "`quantize`, `dequantize`",
    nf4conv.VerifyReport: "`verify`",
    nf4conv.Evaluations: "`evaluate`",
    nf4conv.Inspection: "`inspect`",
    nf4conv.Environment: "`env`",
}

_OPTIONS_INTRODUCTION: Final = """\
# Commands and options

*Made by docs/generate.py from the fields of the option classes.* The functions in Python take the
same options as keywords: `--max-shard-size 5GB` is `max_shard_size=5 * 10**9`.
"""

_JSON_INTRODUCTION: Final = f"""\
## What --json prints

Each result begins with `schema_version`, `nf4conv` (the version) and `command`. The result of
`verify` then has the `verdict` in one line. `schema_version` is {SCHEMA_VERSION}; it grows
when a field is renamed, removed, or gets another meaning, not when one is added. Sizes are in
bytes, times in seconds; errors are ratios. Numbers that JSON cannot spell are the strings `"nan"`,
`"inf"` and `"-inf"`. The functions of the Python API return the same results as dataclasses.

An error is an object too: `error` is the line that stderr shows, `kind` the name of its class, and
`exit_code` that of the process. `path` and `tensor` name what it is about, as far as that is known.
"""


def options_page() -> str:
    """Returns docs/options.md: the options of every command, and the fields of --json."""
    lines = [_OPTIONS_INTRODUCTION]
    context = click.Context(main, info_name="nf4conv", **main.context_settings)
    for name in main.list_commands(context):
        command = main.commands[name]
        with click.Context(command, parent=context, info_name=name) as inner:
            lines += _command(name, command, inner)
    return "\n".join([*lines, *_results()])


def _command(name: str, command: click.Command, context: click.Context) -> Iterator[str]:
    """Yields the lines about a command."""
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"## nf4conv {name}", "", f"`nf4conv {name} {usage}`", "")
    for paragraph in str(command.help).split("\n\n"):
        yield from (textwrap.fill(" ".join(paragraph.split()), 100), "")
    for title, options in grouped(command, context):
        yield from (f"**{title}**", "", "| option | default | meaning |", "|---|---|---|")
        for option in options:
            yield _option(option, context)
        yield ""


def _option(option: click.Option, context: click.Context) -> str:
    """Returns an option as a row of a table."""
    record = option.get_help_record(context)
    assert record is not None
    spelled, help = record
    meaning, _, extra = help.partition("  [")
    default = ""
    found = re.search(r"\bdefault: ([^\];]*)", extra)
    if found is not None:
        default = found[1]
    return f"| `{_escaped(spelled)}` | {_escaped(default)} | {_escaped(meaning)} |"


def _results() -> Iterator[str]:
    """Yields every field of every result, then of every row inside results."""
    yield _JSON_INTRODUCTION
    for kind, commands in RESULTS.items():
        yield from (f"### {kind.__name__}: {commands}", "", *_class(kind))
    for kind in sorted(row_classes(), key=lambda kind: kind.__name__):
        yield from (f"### {kind.__name__}", "", *_class(kind))


def row_classes() -> list[type[Any]]:
    """Returns the dataclasses that fields of results hold, directly or in each other."""
    found: list[type[Any]] = []
    ahead: list[type[Any]] = list(RESULTS)
    while ahead:
        for hint in get_type_hints(ahead.pop()).values():
            for part in _parts(hint):
                is_result = isinstance(part, type) and not issubclass(part, Checked)
                if is_result and is_dataclass(part) and part not in found:
                    found.append(part)
                    ahead.append(part)
    return found


def _class(kind: type[Any]) -> Iterator[str]:
    """Yields the summary of a dataclass, and a table of its fields."""
    yield from (textwrap.fill(" ".join(_summary(kind).split()), 100), "")
    meanings = attributes(kind)
    hints = get_type_hints(kind)
    yield from ("| field | type | meaning |", "|---|---|---|")
    for field in fields(kind):
        meaning = _escaped(meanings.get(field.name, ""))
        yield f"| `{field.name}` | {_json_type(hints[field.name])} | {meaning} |"
    yield ""


def attributes(kind: type[Any]) -> dict[str, str]:
    """Returns what the docstrings of a class and of its bases say of each field, in one line each.

    The section is in Google style: "name: text." for each field, with more lines indented below it.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        section = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2]
        name = ""
        for line in section.splitlines():
            entry = re.fullmatch(r" {4}(\w+): (.*)", line)
            if entry is not None:
                name = entry[1]
                found[name] = entry[2]
            elif line.startswith(" " * 8):
                found[name] += f" {line.strip()}"
            elif line:
                break  # the section has ended
    return found


def _summary(kind: type[Any]) -> str:
    """Returns the docstring of a class without its Attributes."""
    return inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")[0]


def _parts(hint: Any) -> Iterator[Any]:
    """Yields a type and the types that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _json_type(hint: Any) -> str:
    """Returns a type in words of JSON, with links to the tables of classes."""
    links: list[str] = []
    for part in _parts(hint):
        if part is VerifyOptions:
            return "object: the options of the command"
        if is_dataclass(part):
            assert isinstance(part, type)
            links.append(f"[{part.__name__}](#{part.__name__.lower()})")
    if links:
        linked = " or ".join(links)
        if "tuple" in str(hint):
            return f"list of {linked}"
        if "Mapping" in str(hint):
            return f"object: {linked}"
        return linked
    text = re.sub(r"<(?:class|enum) '(?:\w+\.)*(\w+)'>|(?:\w+\.)+(\w+)", r"\1\2", str(hint))
    text = re.sub(r"(?:Mapping|dict)\[(.*?)\]", "object", text)
    text = text.replace("tuple[", "list[").replace(", ...]", "]")
    return text.replace("|", "or").replace("Any", "any")


def _escaped(text: str) -> str:
    """Returns a text that does not end the cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    (HERE / "options.md").write_text(options_page(), encoding="utf-8")
