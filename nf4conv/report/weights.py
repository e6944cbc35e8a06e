"""Judges what was measured of packed weights: their faults, a row for each, and sums by kind."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from nf4conv.options import VerifyOptions
from nf4conv.report.measured import PieceErrors, ScaleErrors, WeightResult
from nf4conv.report.places import by_kind, place_of
from nf4conv.report.rows.figures import decibels, relative_error
from nf4conv.report.rows.weights import WeightKind, WeightRow
from nf4conv.report.tolerance import tolerance_of
from nf4conv.sources.stored_weights import StoredWeight


def weight_faults(result: WeightResult, options: VerifyOptions) -> Iterator[tuple[str, str]]:
    """Yields everything that is wrong with the values of a weight.

    Args:
        result: what was measured of the weight.
        options: what verification requires.

    Yields:
        The name of the check that the weight fails, and a text for the user.
    """
    if result.improper:
        yield (
            "scales",
            f"{result.improper:,} scales are infinite or NaN, or negative without being searched",
        )
    if result.is_damaged:
        yield "codes", "is not what calibration made of it"
    errors = result.errors
    scales = result.scales
    if errors is None or scales is None:
        return
    yield from _scale_faults(scales)
    if errors.not_nearest:
        elements = result.weight.elements
        yield "codes", f"{errors.not_nearest:,} of {elements:,} codes are not the nearest"
    if errors.outside:
        quant_type = result.weight.format.quant_type
        yield "bound", f"{errors.outside:,} values are beyond the worst case of {quant_type}"
    error = relative_error(errors.squared_error, errors.squared_weight)
    tolerance = tolerance_of(result.weight.format, options.tolerance)
    if not error <= tolerance:  # NaN is no error that passes
        yield "tolerance", f"relative error {error:.4f}, more than {tolerance:g}"
    if options.exact:
        yield from _exact_faults(result.weight, errors, scales)


def _scale_faults(scales: ScaleErrors) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the scales of a weight, compared with its source."""
    if scales.wrong:
        yield (
            "scales",
            f"{scales.wrong:,} scales do not follow from the source; "
            f"the first is of block {scales.first:,}",
        )
    if scales.wrong_nested:
        yield (
            "scales",
            f"{scales.wrong_nested:,} nested scales, or the offset, do not follow from the source",
        )


def _exact_faults(
    weight: StoredWeight, errors: PieceErrors, scales: ScaleErrors
) -> Iterator[tuple[str, str]]:
    """Yields in which bytes a weight is not what quantizing its source gives."""
    if errors.differing or scales.differing or scales.described:
        yield (
            "exact",
            f"{errors.differing:,} bytes of codes, {scales.differing:,} of scales and "
            f"{scales.described:,} of code maps and quant state differ",
        )
    codes = weight.values
    if codes.shape != (codes.elements, 1):
        yield "exact", f"the codes are {list(codes.shape)}, expected {[codes.elements, 1]}"


def weight_row(result: WeightResult, options: VerifyOptions) -> WeightRow:
    """Returns the row of a report that describes a weight."""
    weight = result.weight
    format = weight.format
    place = place_of(weight.name)
    tolerance = tolerance_of(format, options.tolerance)
    row = WeightRow(
        name=weight.name,
        stack=place.stack,
        layer=place.layer,
        kind=place.kind,
        file=weight.values.file.name,
        quant_type=format.quant_type,
        blocksize=format.blocksize,
        dtype=format.dtype,
        shape=weight.shape,
        nested_offset=weight.nested_offset,
        double_quant=format.double_quant,
        scales=format.scales,
        parameters=weight.elements,
        bytes=weight.nbytes,
        tolerance=tolerance,
        bytes_differing=result.bytes_differing,
    )
    errors = result.errors
    if errors is None:
        return row
    error = relative_error(errors.squared_error, errors.squared_weight)
    return replace(
        row,
        relative_error=error,
        snr_db=decibels(error),
        largest_error=errors.max_error,
        largest_error_of_absmax=errors.max_relative_error,
        outside=errors.outside,
        not_nearest=errors.not_nearest,
        squared_error=errors.squared_error,
        squared_weight=errors.squared_weight,
    )


def weight_kinds(rows: Iterable[WeightRow]) -> Iterator[WeightKind]:
    """Sums up the rows of each kind of module in each stack of layers."""
    for stack, kind, members in by_kind(rows, lambda row: row):
        parameters = 0
        size = 0
        errors: list[float] = []
        squared_errors: list[float] = []
        squared_weights: list[float] = []
        for row in members:
            parameters += row.parameters
            size += row.bytes
            if row.relative_error is not None:
                errors.append(row.relative_error)
            if row.squared_error is not None and row.squared_weight is not None:
                squared_errors.append(row.squared_error)
                squared_weights.append(row.squared_weight)
        squared_weight = math.fsum(squared_weights)
        error = None
        if squared_weight:
            error = relative_error(math.fsum(squared_errors), squared_weight)
        yield WeightKind(
            stack=stack,
            kind=kind,
            weights=len(members),
            parameters=parameters,
            bytes=size,
            relative_error=error,
            largest_relative_error=max(errors, default=None),
        )
