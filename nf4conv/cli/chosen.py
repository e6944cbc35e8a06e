"""Gathers the options that a user chose (`chosen`), and refuses those without effect."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from nf4conv.options import SourceOptions

OptionsT = TypeVar("OptionsT")


def chosen(kind: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    """Gathers the options of one kind.

    Raises:
        OptionError: an option has a value that it cannot have.
    """
    return kind(**given_to(kind, values))


def given_to(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are fields of a class of options."""
    names = {field.name for field in fields(kind) if field.init}
    return {name: value for name, value in values.items() if name in names}


def refuse_alone(useless: str, *, needed: str) -> NoReturn:
    """Refuses an option that has no effect without another one."""
    raise click.UsageError(f"{useless} means nothing without {needed}")


def check_source_options(where: SourceOptions, *places: str) -> None:
    """Refuses options about the Hub or about GGUF files if they have no effect on any place.

    Args:
        where: the options.
        places: the checkpoints that the options are about. None, if --source was not given.
    """
    _check_hub_options(where, places)
    has_gguf = where.gguf_file is not None or any(".gguf" in place for place in places)
    if where.config_from is not None and not has_gguf:
        refuse_alone("--config-from", needed="a GGUF file: name one, or give --gguf-file")


def _check_hub_options(where: SourceOptions, places: Sequence[str]) -> None:
    """Refuses options about the Hub if all places are on this disk."""
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
