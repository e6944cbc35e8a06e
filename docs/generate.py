"""Writes docs/options.md and docs/json.md from the code that they describe; tests/test_docs.py
holds them to it.

Usage: python docs/generate.py
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import click

from nf4conv.cli import grouped, main
from nf4conv.report import results
from nf4conv.report.as_json import SCHEMA_VERSION

HERE: Final = Path(__file__).parent
RESULTS: Final = {
    results.PlanReport: "`quantize --dry-run`, `dequantize --dry-run`",
    results.QuantizeReport: "`quantize`",
    results.DequantizeReport: "`dequantize`",
    results.FinishReport: "`finish`",
    results.VerifyReport: "`verify`",
    results.ComparisonReport: "`compare`",
    results.Evaluation: "`evaluate`",
    results.Inspection: "`inspect`",
    results.Environment: "`env`",
}

_JSON_INTRODUCTION: Final = f"""\
# What --json prints

*Made by docs/generate.py from the results' own classes.*

Each begins with `schema_version`, `nf4conv` (the version), `command`, and of `verify` and `compare` the `verdict`
in one line. `schema_version` is {SCHEMA_VERSION}; it grows when a field is renamed, removed, or means something else,
not when one is added. Sizes are in bytes, times in seconds; errors are ratios. Numbers that JSON cannot spell are the
strings `"nan"`, `"inf"` and `"-inf"`. The same results come from Python, as dataclasses."""


def options_page() -> str:
    """Every command, and its options by purpose."""
    return "\n".join(
        [
            "# Commands and options",
            "",
            "*Made by docs/generate.py from the command line itself.*",
            *_commands(),
        ]
    )


def _commands() -> Iterator[str]:
    context = click.Context(main, info_name="nf4conv", **main.context_settings)
    for name in main.list_commands(context):
        command = main.commands[name]
        with click.Context(command, parent=context, info_name=name) as inner:
            usage = " ".join(command.collect_usage_pieces(inner))
        yield from ("", f"## nf4conv {name}", "", f"`nf4conv {name} {usage}`")
        yield from (
            f"\n{textwrap.fill(paragraph, 116)}" for paragraph in str(command.help).split("\n\n")
        )
        for title, options in grouped(command, inner):
            yield from ("", f"**{title}**", "", "| option | default | meaning |", "|---|---|---|")
            yield from (_option(option, inner) for option in options)


def _option(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None
    spelled, meaning = (text.replace("|", "\\|") for text in record)
    sentence, _, rest = meaning.partition("  [")
    default = re.search(r"default: ([^\]]*?)(?:;.*)?\]?$", rest)
    return f"| `{spelled}` | {default[1] if default else ''} | {sentence} |"


def json_page() -> str:
    """Every field of every result."""
    return "\n".join(_json())


def _json() -> Iterator[str]:
    yield _JSON_INTRODUCTION
    seen: dict[type[Any], None] = {}
    for kind, command in RESULTS.items():
        yield from ("", f"## {kind.__name__}: {command}", "", _summary(kind), "", *_table(kind))
        seen |= dict.fromkeys(_rows(kind))
    pending = list(seen)
    for kind in pending:
        pending += [row for row in _rows(kind) if row not in pending]
    for kind in sorted(pending, key=lambda kind: kind.__name__):
        yield from ("", f"### {kind.__name__}", "", _summary(kind), "", *_table(kind))
    yield ""


def _summary(kind: type[Any]) -> str:
    return inspect.cleandoc(kind.__doc__ or "").replace("\n", " ")


def _table(kind: type[Any]) -> Iterator[str]:
    meanings = _meanings(kind)
    hints = get_type_hints(kind)
    yield from ("| field | type | meaning |", "|---|---|---|")
    for field in fields(kind):
        yield f"| `{field.name}` | {_type(hints[field.name])} | {meanings.get(field.name, '')} |"


def _meanings(kind: type[Any]) -> dict[str, str]:
    """What the comments beside, or above, the fields of a class and its bases say of each."""
    found: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if is_dataclass(base)]):
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            above += re.findall(r"^    # (.*)", line)
            if field := re.match(r"    (\w+): [^#]*(?:  # (.*))?$", line):
                text = " ".join([*above, field[2] or ""]).strip(" .").replace("|", "\\|")
                found[field[1]] = f"{text}." if text else ""
                above = []
    return found


def _parts(hint: Any) -> Iterable[Any]:
    """A type, and what it is made of."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _rows(kind: type[Any]) -> list[type[Any]]:
    return [
        part
        for hint in get_type_hints(kind).values()
        for part in _parts(hint)
        if is_dataclass(part)
    ]  # type: ignore[misc]


def _type(hint: Any) -> str:
    rows = [part.__name__ for part in _parts(hint) if is_dataclass(part)]
    if rows:
        linked = " or ".join(f"[{name}](#{name.lower()})" for name in dict.fromkeys(rows))
        return (
            f"list of {linked}"
            if "tuple" in str(hint)
            else f"object: {linked}"
            if "Mapping" in str(hint)
            else linked
        )
    text = re.sub(r"<(?:class|enum) '(?:\w+\.)*(\w+)'>|(?:\w+\.)+(\w+)", r"\1\2", str(hint))
    text = re.sub(r"(?:Mapping|dict)\[(.*?)\]", "object", text).replace("Status", "str")
    return (
        text.replace("|", "or")
        .replace("tuple[", "list[")
        .replace(", ...]", "]")
        .replace("Any", "any")
    )


def pages() -> dict[str, str]:
    """What is generated, by file name."""
    return {"options.md": options_page() + "\n", "json.md": json_page()}


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")
