"""Words errors and notes for callers in Python, who know options as keywords.

Messages are written as the command line spells options: "--moe packed". For a caller in Python the
same message says moe='packed'. The command line prints `Nf4convError.line`, which stays as written,
and runs in a context in which results stay as written too.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache, wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar, get_args, get_origin

from nf4conv import options
from nf4conv.choices import Dtype
from nf4conv.errors import Nf4convError, OptionError

Taken = ParamSpec("Taken")
Returned = TypeVar("Returned")

_CLASSES: Final = (
    options.QuantizeOptions,
    options.DequantizeOptions,
    options.VerifyOptions,
    options.CompareOptions,
    options.EvaluateOptions,
    options.RunOptions,
    options.SourceOptions,
    options.PushOptions,
)

_NOT_FIELDS: Final = {"dry-run": "describe_plan", "no-double-quant": "double_quant=False"}
"""What callers in Python have instead of options that are no fields of a class."""

_ARGUMENTS: Final = ("source",)
"""Options that are arguments of a function."""

_NUMBERS: Final = (int, int | None, float | None)

_SHORT_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The values of --dtype that Python does not take."""

_VALUES: Final = {
    "calibrate": r"default|ids\.npy",
    "config_from": r"REPO",
    "device": r"auto|all|(?:cpu|cuda(?::\w+)?)(?:,(?:cpu|cuda(?::\w+)?))*",
    "gguf_file": r"NAME",
    "mmproj": r"FILE",
    "part": r"auto|I/N|\d+/\d+",
    "subfolder": r"NAME|transformer|text_encoder",
    "text": r"ids\.npy",
    "tolerance": r"\d+(?:\.\d+)?",
}
"""Values that messages name behind an option, by its field: patterns."""

LINES: Final = frozenset({"notes", "complaints", "advice", "lacking", "reason", "text"})
"""The fields of results that hold lines for the user."""

PARTS: Final = frozenset({"submodels", "kinds", "tensors", "findings"})
"""The fields of results that hold smaller results with such lines."""

_is_command_line: ContextVar[bool] = ContextVar("is_command_line", default=False)

# a command for a shell, up to the end of its clause
_COMMAND = re.compile(r"""nf4conv [a-z]+ (?:'[^']*'|"[^"]*"|[^;,`'"])*""")
_OPTION = re.compile(r"(?<![^\s(])--([a-z]+(?:-[a-z]+)*)")
# where an unfinished run differs, values stand behind "was"
_DIFFERENCES = re.compile(r"differs in .*? was ")


def named_as_keywords(function: Callable[Taken, Returned]) -> Callable[Taken, Returned]:
    """Has the errors and results of a public function name options as keywords."""

    @wraps(function)
    def call(*args: Taken.args, **kwargs: Taken.kwargs) -> Returned:
        try:
            result = function(*args, **kwargs)
        except OptionError:
            raise  # it names the field already
        except Nf4convError as error:
            error.args = (in_python(error.line), *error.args[1:])
            raise
        return result if _is_command_line.get() else _worded(result)

    return call


@contextmanager
def as_on_command_line() -> Iterator[None]:
    """Lets results name options as the command line does while the `with` block runs."""
    before = _is_command_line.set(True)
    try:
        yield
    finally:
        _is_command_line.reset(before)


def in_callers_words(line: str) -> str:
    """Returns a message as whoever called nf4conv knows options: the command line, or Python."""
    return line if _is_command_line.get() else in_python(line)


def _worded(result: Any) -> Any:
    """Returns a result whose lines for the user name options as keywords."""
    if isinstance(result, str):
        return _line_in_python(result)
    if isinstance(result, tuple):
        return tuple(map(_worded, result))
    if isinstance(result, Mapping):
        return {name: _worded(part) for name, part in result.items()}
    if not is_dataclass(result) or isinstance(result, type):
        return result
    changed = {}
    for name in (LINES | PARTS).intersection(field.name for field in fields(result)):
        before = getattr(result, name)
        after = _worded(before)
        if after != before:
            changed[name] = after
    return replace(result, **changed) if changed else result


def in_python(line: str) -> str:
    """Returns a message with options named as keywords.

    Args:
        line: the message, with options as on the command line. Commands for a shell in it stay.

    Example:
        >>> in_python("OUT: exists; choose another file, or --overwrite")
        'OUT: exists; choose another file, or overwrite=True'
    """
    words = []
    at = 0
    for command in _COMMAND.finditer(line):
        words.append(_translated(line[at : command.start()]))
        words.append(command[0])
        at = command.end()
    words.append(_translated(line[at:]))
    return "".join(words)


@lru_cache(maxsize=1024)  # a reason is that of many tensors
def _line_in_python(line: str) -> str:
    return in_python(line)


def _translated(text: str) -> str:
    """Translates the options in a text without commands."""
    text = _DIFFERENCES.sub(lambda found: _OPTION.sub(_field_of, found[0]), text)
    words = []
    at = 0
    for option in _OPTION.finditer(text):
        if option.start() < at:
            continue
        keyword, end = _keyword(text, option)
        words.append(text[at : option.start()])
        words.append(keyword)
        at = end
    words.append(text[at:])
    return "".join(words)


def _field_of(option: re.Match[str]) -> str:
    """Returns the name of the field for an option; the option itself if it is no field."""
    name = option[1].replace("-", "_")
    return name if name in _kinds() or name in _ARGUMENTS else option[0]


def _keyword(text: str, option: re.Match[str]) -> tuple[str, int]:
    """Returns an option as a keyword, with the value behind it, and where in the text it ends."""
    if option[1] in _NOT_FIELDS:
        return _NOT_FIELDS[option[1]], option.end()
    name = _field_of(option)
    kind = _kinds().get(name)
    if kind is bool:
        return f"{name}=True", option.end()
    value = None if kind is None else _value_pattern(name, kind).match(text, option.end())
    if value is None:
        return name, option.end()
    return f"{name}={_spelled(kind, value[1])}", value.end()


def _value_pattern(name: str, kind: Any) -> re.Pattern[str]:
    """Returns what matches a space and the value of a field."""
    values = [r"\S+(?=: )"]  # behind ": " is what is wrong with the value
    for part in (kind, *get_args(kind)):  # a Literal, or a Literal | None
        if get_origin(part) is Literal:
            values += [re.escape(str(choice)) for choice in get_args(part)]
    if kind == Dtype | None:
        values += _SHORT_DTYPES
    if name in _VALUES:
        values.append(_VALUES[name])
    return re.compile(rf" ({'|'.join(values)})(?![\w/.-])")


def _spelled(kind: Any, value: str) -> str:
    """Returns a value as Python spells it in a call."""
    value = _SHORT_DTYPES.get(value, value)
    if get_origin(kind) is tuple:
        return f"[{value!r}]"
    if kind in _NUMBERS:
        return value
    return repr(value)


def _kinds() -> dict[str, Any]:
    """Returns the types of all fields, by name."""
    kinds: dict[str, Any] = {}
    for kind in _CLASSES:
        for field in fields(kind):
            kinds.setdefault(field.name, field.type)
    return kinds
