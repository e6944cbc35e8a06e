"""Makes what is needed of an option from the field of a dataclass that declares it.

options.py declares the fields. Here are what a field says besides its type and default, the checks
that follow from it, and the keywords of the functions in Python. cli/parameters.py makes click's
options from the same fields, docs/generate.py a page.
"""

import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from functools import wraps
from types import NoneType
from typing import (
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from nf4conv.errors import OptionError, PlanError

Keywords = ParamSpec("Keywords")
DefaultT = TypeVar("DefaultT")
OptionsT = TypeVar("OptionsT")
PlaceT = TypeVar("PlaceT")
OutT = TypeVar("OutT")
ResultT = TypeVar("ResultT")

_KEY: Final = "nf4conv"
_COLUMNS: Final = 100


class Group(Enum):
    """Names the groups of options, in the order in which --help shows them."""

    RESULT = "What is made"
    WEIGHTS = "Which weights"
    CHECKS = "Checks"
    PUBLISHING = "Publishing"
    SOURCE = "Where it comes from"
    MACHINE = "This machine"
    DISPLAY = "What is shown"


@dataclass(frozen=True)
class Description:
    """Says of an option what its type and default do not.

    Attributes:
        group: where --help shows it.
        help: a sentence or two. --help and docs/options.md show it, and help() of the function.
        metavar: what stands for its value in --help.
        unset: what None takes, for --help to show as the default.
        needs: the name of the option without which this one has no effect.
        least: the smallest value.
        most: the largest value.
        expected: the values that it may have, in words, where the type does not tell.
        check: returns True for a value that it may have.
        is_size: True for a number of bytes, which the command line reads with a unit.
        in_python: True for what only callers in Python can give.
    """

    group: Group
    help: str
    metavar: str | None = None
    unset: str = ""
    needs: str = ""
    least: int = 0
    most: float = math.inf
    expected: str = ""
    check: Callable[[str], bool] | None = None
    is_size: bool = False
    in_python: bool = False


def option(
    default: DefaultT, group: Group, help: str, *, is_secret: bool = False, **details: Any
) -> DefaultT:
    """Declares a field that is an option, with its default and its description.

    Args:
        default: the value that it has if it is not given.
        group: as in Description.
        help: as in Description.
        is_secret: True keeps its value out of the repr.
        details: the other attributes of Description.
    """
    metadata = described(group, help, **details)
    in_python = metadata[_KEY].in_python
    made: Any = field(default=default, metadata=metadata, repr=not is_secret, compare=not in_python)
    return made  # type: ignore[no-any-return]  # a type checker is to take the default for it


def described(group: Group, help: str, **details: Any) -> Mapping[str, Description]:
    """Returns the metadata of a field that is an option without a default."""
    return {_KEY: Description(group, help, **details)}


def options_of(kind: type[Any]) -> list[tuple[Field[Any], Description]]:
    """Returns the fields of a class that are options of its command, in the order of groups.

    A command whose class declares a field again with `init=False` does not have that option.
    """
    declared = [one for one in fields(kind) if one.init and _KEY in one.metadata]
    options = [(one, one.metadata[_KEY]) for one in declared]
    order = list(Group)
    return sorted(options, key=lambda option: order.index(option[1].group))


def deciding(options: Any) -> dict[str, Any]:
    """Returns the options that decide what is made, for records and fingerprints.

    They are those that the class of the command itself declares, and not its base classes, which
    say where the source is and how to use the machine.
    """
    own = type(options).__annotations__
    return {one.name: getattr(options, one.name) for one in fields(options) if _decides(one, own)}


def narrowed(options: Any, kind: type[OptionsT]) -> OptionsT:
    """Returns the options that a base class declares, as an instance of that class."""
    names = [one.name for one, description in options_of(kind) if not description.in_python]
    return kind(**{name: getattr(options, name) for name in names})


def _decides(one: Field[Any], own: Mapping[str, Any]) -> bool:
    return one.init and one.name in own and _KEY in one.metadata


def type_of(kind: type[Any], name: str) -> Any:
    """Returns the type of a field, without None if it may be None."""
    hint = get_type_hints(kind)[name]
    parts = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) is Literal or NoneType not in get_args(hint):
        return hint
    if len(parts) == 1:
        return parts[0]
    result = parts[0]
    for part in parts[1:]:
        result |= part
    return result


def holds_names(kind: Any) -> bool:
    """Returns True for the type of a field that holds several names."""
    return get_origin(kind) is tuple or any(get_origin(part) is tuple for part in get_args(kind))


class Checked:
    """Is the base of all classes of options: refuses wrong values when options are made."""

    def __post_init__(self) -> None:
        for one, description in options_of(type(self)):
            value = getattr(self, one.name)
            if value is None and one.default is None:
                continue
            kind = type_of(type(self), one.name)
            if holds_names(kind):
                object.__setattr__(self, one.name, _names(one.name, value))
            else:
                expected = _expected(kind, value, description)
                if expected:
                    raise OptionError(one.name, value, expected)
            is_given = getattr(self, one.name) != one.default
            if is_given and description.needs and not getattr(self, description.needs):
                raise PlanError(
                    f"{typed(one.name)} means nothing without {typed(description.needs)}"
                )


def typed(name: str) -> str:
    """Returns an option as it is typed on the command line."""
    return f"--{name.replace('_', '-')}"


def _names(name: str, value: object) -> tuple[str, ...]:
    """Returns the names that an option holds.

    A str would be read as its letters: "*.layers.0.*" as twelve globs, of which "*" matches all.
    """
    if isinstance(value, str):
        raise OptionError(name, value, f"several names, such as ({value!r},)")
    if not isinstance(value, (tuple, list)) or not all(isinstance(one, str) for one in value):
        raise OptionError(name, value, "a tuple of names, each of which is a str")
    return tuple(value)


def _expected(kind: Any, value: Any, description: Description) -> str:
    """Returns what a value was expected to be; nothing if it is that."""
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return "" if value in choices else f"one of {', '.join(map(str, choices))}"
    if kind is bool:
        return "" if isinstance(value, bool) else "True or False"
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and description.least <= value <= description.most:
            return ""
        return description.expected or _range(description)
    if description.check is not None:
        fits = isinstance(value, str) and description.check(value)
        return "" if fits else description.expected
    return ""


def _range(description: Description) -> str:
    if math.isinf(description.most):
        return f"a whole number from {description.least} on"
    return f"a whole number from {description.least} to {description.most:.0f}"


def after_one_place(
    kind: Callable[Keywords, OptionsT],
) -> Callable[
    [Callable[[PlaceT, OptionsT], ResultT]], Callable[Concatenate[PlaceT, Keywords], ResultT]
]:
    """Lets a function of a place and options take the options as keywords."""

    def decorate(
        function: Callable[[PlaceT, OptionsT], ResultT],
    ) -> Callable[Concatenate[PlaceT, Keywords], ResultT]:
        @wraps(function)
        def call(place: PlaceT, /, *args: Keywords.args, **options: Keywords.kwargs) -> ResultT:
            return function(place, kind(*args, **options))

        _describe(call, function, kind)
        return call

    return decorate


def after_two_places(
    kind: Callable[Keywords, OptionsT],
) -> Callable[
    [Callable[[PlaceT, OutT, OptionsT], ResultT]],
    Callable[Concatenate[PlaceT, OutT, Keywords], ResultT],
]:
    """Lets a function of two places and options take the options as keywords."""

    def decorate(
        function: Callable[[PlaceT, OutT, OptionsT], ResultT],
    ) -> Callable[Concatenate[PlaceT, OutT, Keywords], ResultT]:
        @wraps(function)
        def call(
            place: PlaceT, out: OutT, /, *args: Keywords.args, **options: Keywords.kwargs
        ) -> ResultT:
            return function(place, out, kind(*args, **options))

        _describe(call, function, kind)
        return call

    return decorate


def _describe(call: Any, function: Callable[..., Any], kind: Any) -> None:
    """Gives a function that takes keywords the signature and the docstring that name each."""
    signature = inspect.signature(function)
    places = list(signature.parameters.values())[:-1]
    parameters = [one.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for one in places]
    hints = get_type_hints(kind)
    for one, _ in options_of(kind):
        parameters.append(
            inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if one.default is MISSING else one.default,
                annotation=hints[one.name],
            )
        )
    call.__signature__ = signature.replace(parameters=parameters)
    above, args, below = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    own, gap, rest = below.partition("\n\n")
    entries = "\n".join(_entries(kind))
    call.__doc__ = f"{above}{args}{own}\n{entries}{gap}{rest}"


def _entries(kind: type[Any]) -> Iterator[str]:
    """Yields an entry of a docstring for each option, wrapped and indented."""
    for one, description in options_of(kind):
        default = f"  [default: {description.unset}]" if description.unset else ""
        yield textwrap.fill(
            f"{one.name}: {description.help}{default}",
            _COLUMNS,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
