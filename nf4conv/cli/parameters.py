"""Defines the types of arguments and options that click does not have."""

import re
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from nf4conv.choices import DTYPES

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


class WholeNumber(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Reads a whole number, as click.IntRange does, but --help does not show the range."""

    name = "integer"

    def __init__(self, smallest: int, largest: int | None = None) -> None:
        self._range = click.IntRange(smallest, largest)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number. Refuses one outside of the range."""
        return self._range.convert(value, param, ctx)


class NonNegative(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """Reads a number, as click.FloatRange does, but --help does not show the range."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number. Refuses a negative one."""
        return click.FloatRange(0).convert(value, param, ctx)


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
