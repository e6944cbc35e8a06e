"""Calls the commands as tests do: with options in classes, and in steps.

Users call one function a command, with keywords. Tests hold options in variables and look into
plans.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import nf4conv
from nf4conv.commands.dequantize import execute_dequantization as execute_dequantization
from nf4conv.commands.dequantize import plan_dequantization as plan_dequantization
from nf4conv.commands.describe import describe_plan as describe_plan
from nf4conv.commands.quantize import execute_quantization as execute_quantization
from nf4conv.commands.quantize import plan_quantization as plan_quantization
from nf4conv.commands.verify import execute_verification as execute_verification
from nf4conv.commands.verify import plan_verification as plan_verification
from nf4conv.options import DequantizeOptions as DequantizeOptions
from nf4conv.options import MachineOptions as MachineOptions
from nf4conv.options import PushOptions as PushOptions
from nf4conv.options import QuantizeOptions as QuantizeOptions
from nf4conv.options import RunOptions as RunOptions
from nf4conv.options import SourceOptions as SourceOptions
from nf4conv.options import VerifyOptions as VerifyOptions
from nf4conv.plan.parts import plan_part as plan_part

Progress = Callable[[int], None] | None


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: QuantizeOptions | None = None,
    run: RunOptions | None = None,
    progress: Progress = None,
    where: SourceOptions | None = None,
    push: PushOptions | None = None,
) -> nf4conv.QuantizeReport:
    given = keywords(QuantizeOptions, options, run, where, push)
    return nf4conv.quantize(source, out, progress=progress, **given)


def dequantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: DequantizeOptions | None = None,
    run: RunOptions | None = None,
    progress: Progress = None,
    where: SourceOptions | None = None,
) -> nf4conv.DequantizeReport:
    given = keywords(DequantizeOptions, options, run, where)
    return nf4conv.dequantize(source, out, progress=progress, **given)


def verify_checkpoint(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    run: RunOptions | None = None,
    progress: Progress = None,
    where: SourceOptions | None = None,
) -> nf4conv.VerifyReport:
    machine = None if run is None else replace(run, verify=False, tolerance=None)
    given = keywords(VerifyOptions, options, machine, where)
    return nf4conv.verify(path, **{**given, "source": source, "progress": progress})


def inspect_checkpoint(path: str | Path, where: SourceOptions | None = None) -> nf4conv.Inspection:
    return nf4conv.inspect(path, **keywords(nf4conv.options.InspectOptions, where))


def keywords(kind: Any, *given: Any) -> dict[str, Any]:
    """Returns the fields of a class of options that differ from its defaults in any of these."""
    found = {}
    names = {one.name for one in fields(kind) if one.init}
    for options in given:
        for one in () if options is None else fields(options):
            value = getattr(options, one.name)
            if one.name in names and one.init and value != one.default:
                found[one.name] = value
    return found
