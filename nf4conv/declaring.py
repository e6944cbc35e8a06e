"""Makes what is needed of an option from the field of a dataclass that declares it.

options.py declares the fields. Here are what a field says besides its type and default, the checks
that follow from it, and the keywords of the functions in Python. cli/parameters.py makes click's
options from the same fields, docs/generate.py a page.
"""

import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
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
)

from nf4conv.errors import OptionError, PlanError

Keywords = ParamSpec("Keywords")
OptionsT = TypeVar("OptionsT")
PlaceT = TypeVar("PlaceT")
OutT = TypeVar("OutT")
ResultT = TypeVar("ResultT")


GROUPS: Final = (
    "Usual",
    "What is made",
    "Which weights",
    "Checks",
    "Publishing",
    "Where it comes from",
    "This machine",
    "What is shown",
)
"""The groups of options, in the order in which --help shows them."""


@dataclass(frozen=True)
class Option:
    """Describes an option of a command: a field of its class of options."""

    text: str  # a sentence or two
    group: str = ""  # of GROUPS; if empty, that of the class that declares it
    metavar: str | None = None  # stands for its value in --help
    unset: str = ""  # what None takes, to be shown as the default
    needs: str = ""  # the option without which this one has no effect
    least: int = 0  # of a number
    most: float = math.inf
    check: Callable[[str], object] | None = None  # returns something true for a text that fits
    expected: str = ""  # those texts, in words
    is_size: bool = False  # the command line reads a number of bytes with a unit
    in_python: bool = False  # only callers in Python can give it
    is_secret: bool = False
    # `options_of` tells the rest
    name: str = ""
    hint: Any = None  # the type of the field
    default: Any = None  # MISSING if it must be given

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Returns the types that it may have, without None."""
        if get_origin(self.hint) is Literal:
            return (self.hint,)
        return tuple(one for one in get_args(self.hint) or [self.hint] if one is not NoneType)

    @property
    def holds_names(self) -> bool:
        """Returns True if it holds several names."""
        return get_origin(self.kinds[0]) is tuple

    @property
    def help(self) -> str:
        """Returns its text with what None takes."""
        return f"{self.text}  [default: {self.unset}]" if self.unset else self.text


def option(text: str, *, default: Any = None, **more: Any) -> Any:
    """Declares an option: the field of a dataclass; `more` are other attributes of `Option`."""
    one = Option(text, **more)
    seen = not one.in_python
    return field(
        default=default, repr=seen and not one.is_secret, compare=seen, metadata={"option": one}
    )


def options_of(kind: Any) -> tuple[Option, ...]:
    """Returns the options of a command, in the order of their groups.

    A command whose class declares a field again with `init=False` does not have that option.
    """
    found = []
    for one in fields(kind):
        if one.init:
            said = one.metadata["option"]
            declares = next(base for base in kind.__mro__ if one.name in base.__annotations__)
            known = {"name": one.name, "hint": one.type, "default": one.default}
            found.append(replace(said, group=said.group or declares.group, **known))
    return tuple(sorted(found, key=lambda option: GROUPS.index(option.group)))


def deciding(options: Any) -> dict[str, Any]:
    """Returns the options that decide what is made, for records and fingerprints.

    They are those that the class of the command itself declares, and not its base classes, which
    say where the source is and how to use the machine.
    """
    own = type(options).__annotations__
    names = [one.name for one in fields(options) if one.init and one.name in own]
    return {name: getattr(options, name) for name in names}


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
            expected = _expected(option, value)
            if expected:
                raise OptionError(f"{typed(option.name)} {value}: expected {expected}")
            if option.holds_names:
                object.__setattr__(self, option.name, tuple(value))
            needed = option.needs
            if needed and value != option.default and not getattr(self, needed):
                raise PlanError(f"{typed(option.name)} means nothing without {typed(needed)}")


def typed(name: str) -> str:
    """Returns an option as it is typed on the command line."""
    return f"--{name.replace('_', '-')}"


def _expected(option: Option, value: Any) -> str:
    """Returns what a value was expected to be; nothing if it is that."""
    kind = option.kinds[0]
    expected = option.expected
    if option.holds_names:
        # a str would be read as its letters: "*.norm" as six globs, of which "*" matches all names
        fits = isinstance(value, tuple | list) and all(isinstance(one, str) for one in value)
        expected = "several names, such as ('*.norm', '*.bias')"
    elif get_origin(kind) is Literal:
        fits = value in get_args(kind)
        expected = f"one of {', '.join(map(str, get_args(kind)))}"
    elif kind is bool:
        fits = isinstance(value, bool)
        expected = "True or False"
    elif kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        fits = is_number and option.least <= value <= option.most
        noun = "a whole number" if kind is int else "a number"
        end = "on" if math.isinf(option.most) else f"to {option.most:.0f}"
        expected = f"{noun} from {option.least} {end}"
    else:
        fits = option.check is None or (isinstance(value, str) and bool(option.check(value)))
    return "" if fits else expected


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
    *places, _ = signature.parameters.values()
    parameters = [one.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for one in places]
    parameters += inspect.signature(kind).parameters.values()
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    lines = [inspect.cleandoc(function.__doc__ or ""), "", "Keyword Args:"]
    for option in options_of(kind):
        entry = textwrap.wrap(f"{option.name}: {option.help}", 92, break_on_hyphens=False)
        lines.append(textwrap.indent("\n    ".join(entry), "    "))
    call.__doc__ = "\n".join(lines)
    return call
