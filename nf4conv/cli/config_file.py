"""Takes options from a TOML file (`--config nf4conv.toml`).

A table with the name of a command holds options of that command. What stands above the tables
holds for every command that has such an option. The keys are the long options without their dashes:

    device = "cpu"

    [quantize]
    scales = "search"
    max-shard-size = "5GB"
    include = ["*.layers.*"]
    double-quant = false

An option on the command line wins. No file is read unless --config names it: a file that happens
to lie in the current folder must not decide about the bytes of a checkpoint.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from nf4conv.cli.errors import PRINTS_JSON

_MOST_BYTES: Final = 1_000_000
"""A larger file is something else, and reading it would take memory."""

_ONLY_ON_THE_COMMAND_LINE: Final = {
    "config": "a file cannot name another one",
    "help": "it is for the command line",
    "token": "a file is too easily shared; set HF_TOKEN, or run `hf auth login`",
}


def take_options(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Makes the options in a file the defaults of the command that runs.

    click calls this before it reads the other options.

    Args:
        ctx: the context of the command.
        path: the file. None, if --config was not given.

    Raises:
        click.UsageError: the file cannot be read, is no TOML, or holds what is no option.
    """
    if path is None:
        return
    content = _read(path, ctx)
    commands = _commands_of(ctx)
    _check_tables(content, commands, path, ctx)
    defaults: dict[str, Any] = {}
    own = content.get(ctx.command.name or "", {})
    for key, value in {**_above_tables(content), **own}.items():
        option = _options_of(ctx.command).get(key)
        if option is not None and option.name is not None:
            defaults[option.name] = _convert(option, key, value, path, ctx)
    ctx.default_map = defaults
    if defaults.get("as_json"):
        ctx.meta[PRINTS_JSON] = True


def _read(path: Path, ctx: click.Context) -> dict[str, Any]:
    """Reads a TOML file."""
    import tomllib

    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise click.UsageError(f"--config {path}: {error.strerror}", ctx) from error
    if len(content) > _MOST_BYTES:
        raise click.UsageError(f"--config {path}: is too large to be a file of options", ctx)
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--config {path}: is not UTF-8 text", ctx) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise click.UsageError(f"--config {path}: is not TOML: {error}", ctx) from error


def _commands_of(ctx: click.Context) -> Mapping[str, click.Command]:
    """Returns the commands of the program by their names."""
    program = ctx.find_root().command
    if isinstance(program, click.Group):
        return program.commands
    return {ctx.command.name or "": ctx.command}


def _options_of(command: click.Command) -> dict[str, click.Option]:
    """Returns the options of a command by the keys that they have in a file."""
    options = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            for spelling in parameter.opts:
                if spelling.startswith("--"):
                    options[spelling.removeprefix("--")] = parameter
    return options


def _above_tables(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that hold for every command."""
    return {key: value for key, value in content.items() if not isinstance(value, dict)}


def _check_tables(
    content: Mapping[str, Any],
    commands: Mapping[str, click.Command],
    path: Path,
    ctx: click.Context,
) -> None:
    """Refuses keys that no command has, also those of commands that do not run now.

    A misspelt key would otherwise go unseen until its command runs.
    """
    every = {key for command in commands.values() for key in _options_of(command)}
    _check_keys(_above_tables(content), every, "", path, ctx)
    for name, table in content.items():
        if not isinstance(table, dict):
            continue
        if name not in commands:
            advice = _similar(name, commands)
            raise click.UsageError(f"--config {path}: [{name}] is no command{advice}", ctx)
        _check_keys(table, _options_of(commands[name]), f"[{name}] ", path, ctx)


def _check_keys(
    given: Iterable[str], known: Iterable[str], where: str, path: Path, ctx: click.Context
) -> None:
    """Refuses keys that are no options."""
    for key in given:
        if key not in known:
            advice = _similar(key, known)
            raise click.UsageError(f"--config {path}: {where}{key} is no option{advice}", ctx)
        reason = _ONLY_ON_THE_COMMAND_LINE.get(key)
        if reason is not None:
            raise click.UsageError(
                f"--config {path}: {where}{key} has no place here: {reason}", ctx
            )


def _similar(name: str, known: Iterable[str]) -> str:
    """Returns advice for a misspelt name, or nothing."""
    import difflib  # every start of the program would wait for it

    found = difflib.get_close_matches(name.replace("_", "-"), list(known), n=1)
    if not found:
        return ""
    return f"; did you mean {found[0]}?"


def _convert(
    option: click.Option, key: str, value: object, path: Path, ctx: click.Context
) -> object:
    """Returns the value of an option, which click has converted and checked as one that is typed.

    Raises:
        click.UsageError: it does not fit the option.
    """

    def refuse(expected: str) -> click.UsageError:
        return click.UsageError(f"--config {path}: {key} = {value!r}: {expected}", ctx)

    if option.is_flag:
        if not isinstance(value, bool):
            raise refuse("write true or false")
        return value
    if option.multiple:
        if not isinstance(value, list):
            raise refuse("write a list, such as ['…']")
        typed: object = [_as_typed(one, refuse("a list holds texts or numbers")) for one in value]
    else:
        typed = _as_typed(value, refuse("write a text or a number"))
    try:
        option.type_cast_value(ctx, typed)
    except click.BadParameter as error:
        raise refuse(error.message) from error
    return typed


def _as_typed(value: object, otherwise: click.UsageError) -> str:
    """Returns a value as a user would type it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise otherwise
    return str(value)
