"""Makes what is needed of an option from the field of a dataclass that declares it.

options.py declares the fields. Here are what a field says besides its type and default, the checks
that follow from it, and the keywords of the functions in Python. cli/parameters.py makes click's
options from the same fields, docs/generate.py a page.
"""

import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from functools import partial, reduce, wraps
from operator import or_
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
OptionsT = TypeVar("OptionsT")
PlaceT = TypeVar("PlaceT")
OutT = TypeVar("OutT")
ResultT = TypeVar("ResultT")

_COLUMNS: Final = 100


class Group(Enum):
    """Names the groups of options, in the order in which --help shows them."""

    USUAL = "Usual"
    RESULT = "What is made"
    WEIGHTS = "Which weights"
    CHECKS = "Checks"
    PUBLISHING = "Publishing"
    SOURCE = "Where it comes from"
    MACHINE = "This machine"
    DISPLAY = "What is shown"


@dataclass(frozen=True)
class Option:
    """Describes an option of a command: a field of its class of options.

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
        name: the name of the field. `options_of` tells it, and what follows.
        hint: the type of the field.
        default: MISSING if it must be given.
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
    name: str = ""
    hint: Any = None
    default: Any = None

    @property
    def kind(self) -> Any:
        """Returns its type, without None."""
        parts = get_args(self.hint)
        if NoneType not in parts:
            return self.hint
        return reduce(or_, [part for part in parts if part is not NoneType])

    @property
    def holds_names(self) -> bool:
        """Returns True if it holds several names."""
        return any(get_origin(part) is tuple for part in get_args(self.kind))


def option(
    group: Group,
    help: str,
    *,
    default: Any = None,
    repr: bool = True,
    compare: bool = True,
    **more: Any,
) -> Any:
    """Declares an option: the field of a dataclass; `more` are other attributes of `Option`."""
    metadata = {"option": Option(group, help, **more)}
    return field(default=default, repr=repr, compare=compare, metadata=metadata)


def options_of(kind: Any) -> list[Option]:
    """Returns the options of a command, in the order of their groups.

    A command whose class declares a field again with `init=False` does not have that option.
    """
    if kind not in _OPTIONS:
        hints = get_type_hints(kind)
        found = []
        for one in fields(kind):
            if one.init:
                said = one.metadata["option"]
                known = {"name": one.name, "hint": hints[one.name], "default": one.default}
                found.append(replace(said, **known))
        order = list(Group)
        _OPTIONS[kind] = sorted(found, key=lambda option: order.index(option.group))
    return _OPTIONS[kind]


_OPTIONS: Final[dict[Any, list[Option]]] = {}


def deciding(options: Any) -> dict[str, Any]:
    """Returns the options that decide what is made, for records and fingerprints.

    They are those that the class of the command itself declares, and not its base classes, which
    say where the source is and how to use the machine.
    """
    own = type(options).__annotations__
    names = {option.name for option in options_of(type(options)) if option.name in own}
    return {one.name: getattr(options, one.name) for one in fields(options) if one.name in names}


def narrowed(options: Any, kind: type[OptionsT]) -> OptionsT:
    """Returns the options that a base class declares, but for `progress`, as its instance."""
    names = [option.name for option in options_of(kind) if option.name != "progress"]
    return kind(**{name: getattr(options, name) for name in names})


class Checked:
    """Is the base of all classes of options: refuses wrong values when options are made."""

    def __post_init__(self) -> None:
        for option in options_of(type(self)):
            value = getattr(self, option.name)
            if value is None and option.default is None:
                continue
            if option.holds_names:
                object.__setattr__(self, option.name, _names(option.name, value))
                continue
            expected = _expected(option, value)
            if expected:
                raise OptionError(option.name, value, expected)
            needed = option.needs
            if needed and value != option.default and not getattr(self, needed):
                raise PlanError(f"{typed(option.name)} means nothing without {typed(needed)}")


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


def _expected(option: Option, value: Any) -> str:
    """Returns what a value was expected to be; nothing if it is that."""
    kind = option.kind
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return "" if value in choices else f"one of {', '.join(map(str, choices))}"
    if kind is bool:
        return "" if isinstance(value, bool) else "True or False"
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if is_number and math.isfinite(value) and option.least <= value <= option.most:
            return ""
        end = "on" if math.isinf(option.most) else f"to {option.most:.0f}"
        start = f"a whole number from {option.least} "
        return option.expected or (start + end)
    if option.check is not None:
        fits = isinstance(value, str) and option.check(value)
        return "" if fits else option.expected
    return ""


def after_one_place(
    kind: Callable[Keywords, OptionsT],
) -> Callable[
    [Callable[[PlaceT, OptionsT], ResultT]], Callable[Concatenate[PlaceT, Keywords], ResultT]
]:
    """Lets a function of a place and options take the options as keywords."""
    return partial(_taking_keywords, kind)


def after_two_places(
    kind: Callable[Keywords, OptionsT],
) -> Callable[
    [Callable[[PlaceT, OutT, OptionsT], ResultT]],
    Callable[Concatenate[PlaceT, OutT, Keywords], ResultT],
]:
    """Lets a function of two places and options take the options as keywords."""
    return partial(_taking_keywords, kind)


def _taking_keywords(kind: Any, function: Callable[..., Any]) -> Any:
    """Makes options of keywords; the signature and the docstring name each of them."""

    @wraps(function)
    def call(*places: Any, **options: Any) -> Any:
        return function(*places, kind(**options))

    signature = inspect.signature(function)
    parameters = [
        one.replace(kind=inspect.Parameter.POSITIONAL_ONLY)
        for one in list(signature.parameters.values())[:-1]
    ]
    for option in options_of(kind):
        default = inspect.Parameter.empty if option.default is MISSING else option.default
        keyword = inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option.hint
        )
        parameters.append(keyword)
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    above, args, below = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    own, gap, rest = below.partition("\n\n")
    entries = "\n".join(_entries(kind))
    call.__doc__ = f"{above}{args}{own}\n{entries}{gap}{rest}"
    return call


def _entries(kind: type[Any]) -> Iterator[str]:
    """Yields an entry of a docstring for each option, wrapped and indented."""
    for option in options_of(kind):
        default = f"  [default: {option.unset}]" if option.unset else ""
        yield textwrap.fill(
            f"{option.name}: {option.help}{default}",
            _COLUMNS,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
