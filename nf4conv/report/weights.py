"""From what verification has gathered of a packed weight to its row, its faults, and totals by kind of module."""

import math
from collections.abc import Iterable, Iterator

from nf4conv.options import VerifyOptions
from nf4conv.report.measured import WeightResult, place_of
from nf4conv.report.rows import WeightKind, WeightRow, by_kind, decibels, relative_error
from nf4conv.report.tolerance import RELATIVE_ERRORS


def weight_faults(result: WeightResult, options: VerifyOptions) -> Iterator[tuple[str, str]]:
    """(check, text) of everything that is wrong with a weight's values."""
    errors, scales = result.errors, result.scales
    if result.improper:
        yield "scales", f"{result.improper:,} scales are infinite, NaN or, though not searched, negative"
    if errors is None or scales is None:
        return
    if scales.wrong:
        yield "scales", f"{scales.wrong:,} scales do not follow from the source; the first is of block {scales.first:,}"
    if scales.wrong_nested:
        yield "scales", f"{scales.wrong_nested:,} nested scales, or the offset, do not follow from the source"
    if errors.not_nearest:
        yield "codes", f"{errors.not_nearest:,} of {result.weight.elements:,} codes are not the nearest"
    if errors.outside:
        yield "bound", f"{errors.outside:,} values are beyond the worst case of {result.weight.format.quant_type}"
    error, tolerance = result.relative_error, _tolerance(result, options)
    if error is None or not error <= tolerance:
        yield "tolerance", f"relative error {error:.4f}, more than {tolerance:g}"
    if options.exact and result.bytes_differing:
        counts = f"{errors.differing:,} bytes of codes, {scales.differing:,} of scales"
        yield "exact", f"{counts} and {scales.described:,} of code maps and quant state differ"
    values = result.weight.values
    if options.exact and values.shape != (values.elements, 1):
        yield "exact", f"the codes are {list(values.shape)}, expected {[values.elements, 1]}"


def _tolerance(result: WeightResult, options: VerifyOptions) -> float:
    if options.tolerance is not None:
        return options.tolerance
    format = result.weight.format
    return RELATIVE_ERRORS[format.scales, format.quant_type][format.blocksize][2]


def weight_row(result: WeightResult, options: VerifyOptions) -> WeightRow:
    weight, errors = result.weight, result.errors
    return WeightRow(
        name=weight.name,
        **place_of(weight.name)._asdict(),
        file=weight.values.file.name,
        quant_type=weight.format.quant_type,
        blocksize=weight.format.blocksize,
        dtype=weight.format.dtype,
        shape=weight.shape,
        nested_offset=weight.nested_offset,
        double_quant=weight.format.double_quant,
        parameters=weight.elements,
        bytes=weight.nbytes,
        relative_error=result.relative_error,
        tolerance=_tolerance(result, options),
        snr_db=None if result.relative_error is None else decibels(result.relative_error),
        largest_error=None if errors is None else errors.max_error,
        largest_error_of_absmax=None if errors is None else errors.max_relative_error,
        outside=None if errors is None else errors.outside,
        not_nearest=None if errors is None else errors.not_nearest,
        bytes_differing=result.bytes_differing,
        squared_error=None if errors is None else errors.squared_error,
        squared_weight=None if errors is None else errors.squared_weight,
    )


def weight_kinds(rows: Iterable[WeightRow]) -> Iterator[WeightKind]:
    """Totals of the weights of one kind in one stack of layers."""
    for stack, kind, members in by_kind(rows, lambda row: row):
        errors = [row.relative_error for row in members if row.relative_error is not None]
        squared_error = math.fsum(row.squared_error for row in members if row.squared_error is not None)
        squared_weight = math.fsum(row.squared_weight for row in members if row.squared_weight is not None)
        yield WeightKind(
            stack=stack,
            kind=kind,
            weights=len(members),
            parameters=sum(row.parameters for row in members),
            bytes=sum(row.bytes for row in members),
            relative_error=relative_error(squared_error, squared_weight) if squared_weight else None,
            largest_relative_error=max(errors, default=None),
        )
