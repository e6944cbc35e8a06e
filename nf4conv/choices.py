"""Says which values options may have, and refuses others when options are made.

Type checkers read the `Literal`s. The command line offers the tuples that are made of them.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias, TypeVar, get_args

from nf4conv.errors import OptionError

QuantType: TypeAlias = Literal["nf4", "fp4"]
Blocksize: TypeAlias = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
Scales: TypeAlias = Literal["absmax", "search"]
Dtype: TypeAlias = Literal["bfloat16", "float16", "float32"]
QuantStorage: TypeAlias = Literal["uint8", "bfloat16", "float16", "float32"]
Moe: TypeAlias = Literal["packed", "stacked", "portable", "per-expert"]
CalibrateOutput: TypeAlias = Literal["qkv", "all"]
LoraExperts: TypeAlias = Literal["rank-major", "expert-major"]

QUANT_TYPES: Final = get_args(QuantType)
BLOCKSIZES: Final = get_args(Blocksize)
SCALES: Final = get_args(Scales)
DTYPES: Final = get_args(Dtype)
QUANT_STORAGES: Final = get_args(QuantStorage)
MOE: Final = get_args(Moe)
OUTPUTS: Final = get_args(CalibrateOutput)
LORA_EXPERTS: Final = get_args(LoraExperts)

MOE_ALIASES: Final[Mapping[str, Moe]] = {"per-expert": "packed"}
"""Gives the value for the name that an earlier release had for it."""

_OTHER_DEVICES: Final = {
    "mps": "; on a Mac, cpu is the one",
    "gpu": "; an NVIDIA GPU is cuda",
    "xpu": "; there are kernels for NVIDIA GPUs only, so cpu is the one",
    "hip": "; there are kernels for NVIDIA GPUs only, so cpu is the one",
    "rocm": "; there are kernels for NVIDIA GPUs only, so cpu is the one",
}
"""Tells those who name another device which one to name."""


def require_one_of(options: object, choices: Mapping[str, tuple[object, ...]]) -> None:
    """Checks the fields of options that have a few values only; None is always one of them.

    Args:
        options: an instance of a dataclass.
        choices: the values that a field may have, by its name.

    Raises:
        OptionError: a field has another value.
    """
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value is not None and value not in allowed:
            raise OptionError(name, value, f"one of {', '.join(map(str, allowed))}")


def take_names(options: object, *fields: str) -> None:
    """Makes tuples of the fields that hold several names, each of which is a str.

    A str would be read as its letters: "*.layers.0.*" as twelve globs, of which "*" matches all.

    Args:
        options: an instance of a frozen dataclass, while it is made.
        fields: names of the fields.

    Raises:
        OptionError: a field is a str, or holds something else than names.
    """
    for name in fields:
        value = getattr(options, name)
        if isinstance(value, str):
            raise OptionError(name, value, f"several names, such as ({value!r},)")
        if not isinstance(value, (tuple, list)) or not all(isinstance(one, str) for one in value):
            raise OptionError(name, value, "a tuple of names, each of which is a str")
        object.__setattr__(options, name, tuple(value))


def require_at_least(options: object, least: int, *fields: str) -> None:
    """Checks that fields are None, or whole numbers from `least` on.

    Raises:
        OptionError: a field is something else.
    """
    for name in fields:
        value = getattr(options, name)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= least):
            raise OptionError(name, value, f"a whole number from {least} on")


def require_error(options: object, name: str, example: str) -> None:
    """Checks that a field is None, or an error that can be reached: finite and not negative.

    Raises:
        OptionError: the field is something else.
    """
    value = getattr(options, name)
    if value is not None and not _is_finite(value):
        raise OptionError(name, value, example)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def require_device(device: object) -> None:
    """Checks the name of a device. A list of GPUs is checked where the GPUs are known.

    Raises:
        OptionError: no device has such a name.
    """
    if not isinstance(device, str):
        raise OptionError("device", device, "auto, cpu, cuda or cuda:N")
    if "," in device or re.fullmatch(r"auto|cpu|cuda(:\d+|:all)?", device):
        return
    hint = _OTHER_DEVICES.get(device.partition(":")[0], "")
    raise OptionError("device", device, f"auto, cpu, cuda or cuda:N{hint}")


def require_part(part: object) -> None:
    """Checks the name of a part: None, "auto", or "I/N" with I from 1 to N.

    Raises:
        OptionError: it is something else.
    """
    if part is None or part == "auto":
        return
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", str(part))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise OptionError("part", part, "auto, or I/N with I from 1 to N, such as 2/3")


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


OptionsT = TypeVar("OptionsT", bound=_Dataclass)


def chosen(kind: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    """Gathers the options of one kind.

    Args:
        kind: a dataclass such as RunOptions.
        values: the value of each option that was given, by its name. A field that is not among them
            keeps its default.

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
