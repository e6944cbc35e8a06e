"""Calls the commands with options in classes, which tests hold in variables, and makes plans."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import nf4conv
from nf4conv.commands import dequantize, quantize
from nf4conv.commands.writing import describe as describe_plan
from nf4conv.options import (
    DequantizeOptions,
    InspectOptions,
    MachineOptions,
    PushOptions,
    QuantizeOptions,
    RunOptions,
    SourceOptions,
    VerifyOptions,
)
from nf4conv.plan.parts import plan_part

__all__ = [
    "DequantizeOptions", "MachineOptions", "PushOptions", "QuantizeOptions", "RunOptions",
    "SourceOptions", "VerifyOptions", "describe_plan", "plan_part",
]  # fmt: skip

Place = str | Path


def quantize_checkpoint(source: Place, out: Place, *given: Any, **more: Any) -> Any:
    return nf4conv.quantize(source, out, **keywords(QuantizeOptions, *given, *more.values()))


def dequantize_checkpoint(source: Place, out: Place, *given: Any, **more: Any) -> Any:
    return nf4conv.dequantize(source, out, **keywords(DequantizeOptions, *given, *more.values()))


def verify_checkpoint(path: Place, source: Place | None = None, *given: Any, **more: Any) -> Any:
    found = keywords(VerifyOptions, *given, *more.values())
    return nf4conv.verify(path, **{**found, "source": source})


def inspect_checkpoint(path: Place, where: SourceOptions | None = None) -> nf4conv.Inspection:
    return nf4conv.inspect(path, **keywords(InspectOptions, where))


def plan_quantization(source: Place, *given: Any, **more: Any) -> Any:
    options = QuantizeOptions(**keywords(QuantizeOptions, *given, *more.values()))
    return quantize.make_plan(source, options)


def plan_dequantization(source: Place, *given: Any, **more: Any) -> Any:
    options = DequantizeOptions(**keywords(DequantizeOptions, *given, *more.values()))
    return dequantize.make_plan(source, options)


def execute_quantization(plan: Any, out: Place, *given: Any) -> nf4conv.QuantizeReport:
    options = QuantizeOptions(**keywords(QuantizeOptions, *given))
    return quantize.execute(plan, Path(out), options)


def execute_dequantization(plan: Any, out: Place, *given: Any) -> nf4conv.DequantizeReport:
    options = DequantizeOptions(**keywords(DequantizeOptions, *given))
    return dequantize.execute(plan, Path(out), options)


def keywords(kind: Any, *given: Any) -> dict[str, Any]:
    """Returns the fields of a class of options that differ from its defaults in any of these.

    A function among them is whom to tell how far the command is.
    """
    found: dict[str, Any] = {}
    names = {one.name for one in fields(kind) if one.init}
    for options in given:
        if isinstance(options, Callable):  # type: ignore[arg-type]
            found["progress"] = options
            continue
        for one in () if options is None else fields(options):
            value = getattr(options, one.name)
            if one.name in names and one.init and value != one.default:
                found[one.name] = value
    return found
