"""Gathers the options that a user chose, and refuses options that would have no effect."""

from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import click

import nf4conv


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


OptionsT = TypeVar("OptionsT", bound=_Dataclass)


def chosen(kind: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    """Gathers the options of one kind.

    Args:
        kind: a dataclass such as RunOptions.
        values: the value of every option of the command, by the name of its parameter. A field
            without such an option keeps its default.

    Returns:
        An instance of `kind`.

    Raises:
        OptionError: an option has a value that it cannot have.
    """
    given = {}
    for field in fields(kind):
        if field.name in values:
            given[field.name] = values[field.name]
    return kind(**given)


def refuse_alone(useless: str, *, needed: str) -> NoReturn:
    """Refuses an option that has no effect without another one."""
    raise click.UsageError(f"{useless} means nothing without {needed}")


def check_hub_options(where: nf4conv.SourceOptions, *places: str) -> None:
    """Refuses options about the Hub if all places are on this disk.

    Args:
        where: the options.
        places: the checkpoints that the options are about. None, if --source was not given.
    """
    given = []
    if where.revision:
        given.append("--revision")
    if where.stream:
        given.append("--stream")
    if where.local_files_only:
        given.append("--local-files-only")
    on_the_hub = [place for place in places if not Path(place).exists()]
    if not given or on_the_hub:
        return
    if not places:
        refuse_alone(given[0], needed="--source")
    raise click.UsageError(
        f"{given[0]} is about a model on the Hub, "
        f"not about {' and '.join(places)}, which is on this disk"
    )
