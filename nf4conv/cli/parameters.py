"""Makes click's options from the fields that declare them, and the types that click lacks."""

import re
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from nf4conv.cli.help import option
from nf4conv.declaring import Declared, Option, options_of, typed
from nf4conv.options import DTYPES

# Bytes in a unit, without the B at its end.
_UNITS: Final = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_SHORT_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Reads a number of bytes with a unit, as transformers and huggingface_hub do.

    5GB is 5·10⁹ bytes, 5GiB is 5·2³⁰.
    """

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Returns the number of bytes. Refuses a number without a unit, and 0."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]I?)B?|B)\s*", str(value).upper())
        if match is None:
            if str(value).isdigit():
                self.fail(f"{value!r} needs a unit, such as {value}GB", param, ctx)
            self.fail(f"{value!r} is not a size such as 5GB or 500MB", param, ctx)
        number, unit = match.groups(default="")
        size = int(float(number) * _UNITS[unit])
        if size <= 0:
            self.fail("a size must be positive", param, ctx)
        return size


class Place(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Reads a path, or the name of a model on the Hub, and passes it on unchanged.

    A shell completes it as the path of a "file" or of a folder ("dir").
    """

    name = "place"

    def __init__(self, completes: str) -> None:
        self._completes = completes

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Returns the value. Refuses an empty one.

        An unset variable of a shell leaves an empty value. As a path it would be the current
        folder, which --overwrite clears.
        """
        if not value:
            self.fail("the path is empty; perhaps a shell variable is not set", param, ctx)
        return str(value)

    def shell_complete(
        self, _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Asks the shell to complete a path."""
        return [CompletionItem(incomplete, type=self._completes)]


class Dtype(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """Reads a dtype by its name or its short name: bf16, fp16 or fp32."""

    def __init__(self) -> None:
        super().__init__(DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the full name."""
        return super().convert(_SHORT_DTYPES.get(value, value), param, ctx)


def options_from(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declares the options of a command by the fields of its class of options."""

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        for one in reversed(options_of(kind)):
            if not one.said.in_python:
                command = _option(one)(command)
        return command

    return declare


def _option(declared: Declared) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declares an option by its field."""
    name = typed(declared.name)
    said = declared.said
    default = declared.default
    help = said.help
    if said.unset:
        help += f"  [default: {said.unset}]"
    attributes: dict[str, Any] = {"metavar": said.metavar}
    if declared.kind is bool and default is None:
        name = f"{name}/--no-{name[2:]}"
        attributes["default"] = None
    elif declared.kind is bool:
        attributes["is_flag"] = True
    elif declared.holds_names:
        attributes["multiple"] = True
        help += " May be given again."
    else:
        attributes["type"] = _type_of(declared.kind, said)
        attributes["required"] = default is MISSING
        if default is not MISSING and default is not None:
            attributes["default"] = default
            attributes["show_default"] = not said.is_size
            if said.is_size:
                help += f"  [default: {_spelled(default)}]"
    return option(name, group=said.group, help=help, **attributes)


def _type_of(kind: Any, said: Option) -> Any:
    """Returns click's type of an option that has one value."""
    choices = get_args(kind)
    if said.is_size:
        return Size()
    if choices == DTYPES:
        return Dtype()
    if get_origin(kind) is Literal and isinstance(choices[0], str):
        return click.Choice(choices)
    if get_origin(kind) is Literal:
        return int
    return Place("file") if Path in choices else kind


def _spelled(size: int) -> str:
    """Returns a number of bytes as a user types it."""
    unit, letter = (10**9, "G") if size >= 10**9 else (10**6, "M")
    return f"{size // unit}{letter}B"
