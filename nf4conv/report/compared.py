"""Describes how the tensors of two checkpoints compare: a row for each, and sums by kind."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nf4conv.check.comparing import TensorPair
from nf4conv.format.layout import DTYPE_NAMES
from nf4conv.report.measured import TensorDifference
from nf4conv.report.places import by_kind, place_of
from nf4conv.report.rows.comparison import ComparedKind, ComparedRow, Status
from nf4conv.report.rows.figures import decibels, format_name, relative_error
from nf4conv.sources.encodings.types.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.tensors import TensorInfo


def compared_row(
    name: str, pair: TensorPair, result: TensorDifference | None, tolerance: float | None
) -> ComparedRow:
    """Describes how the tensors of one name compare.

    Args:
        name: the name of both tensors.
        pair: the tensors.
        result: what was measured. None if they cannot be compared.
        tolerance: the largest relative error that passes. None if only identical tensors pass.
    """
    place = place_of(name)
    row = ComparedRow(
        name=name,
        stack=place.stack,
        layer=place.layer,
        kind=place.kind,
        parameters=pair.either.elements,
        format_a=_format(pair.a),
        format_b=_format(pair.b),
        shape_a=_shape(pair.a),
        shape_b=_shape(pair.b),
        status=_status(pair, result),
    )
    difference = None if result is None else result.difference
    if difference is not None:
        error = relative_error(difference.squared_difference, difference.squared_values)
        row = replace(
            row,
            differing=difference.differing,
            relative_error=error,
            snr_db=decibels(error),
            largest_difference=difference.largest_difference,
            squared_difference=difference.squared_difference,
            squared_values=difference.squared_values,
        )
    return replace(row, passed=_passes(row, tolerance))


def _status(pair: TensorPair, result: TensorDifference | None) -> Status:
    """Returns how the tensors of one name compare; `result` is None if they cannot be compared."""
    if pair.a is None:
        return Status.ONLY_B
    if pair.b is None:
        return Status.ONLY_A
    if result is None:
        return Status.SHAPE
    difference = result.difference
    if difference is not None:
        return Status.DIFFERENT if difference.differing else Status.EQUAL
    if result.is_identical:
        return Status.IDENTICAL
    # no values were compared: the tensors have none, or complex ones whose bytes differ
    return Status.DIFFERENT if result.a.elements else Status.EQUAL


def _shape(tensor: TensorInfo | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.shape


def _format(tensor: TensorInfo | None) -> str | None:
    """Returns how a tensor is stored, in a few words; None if there is no tensor."""
    if tensor is None:
        return None
    encoding = tensor.encoding
    if encoding is None:
        return DTYPE_NAMES.get(tensor.dtype, tensor.dtype)
    if isinstance(encoding, Bitsandbytes4bit):
        return format_name(encoding.quant_type, encoding.double_quant, encoding.blocksize)
    return encoding.name


def _passes(row: ComparedRow, tolerance: float | None) -> bool:
    """Returns True if a difference is allowed; without a tolerance, only equal bytes are."""
    if row.status is Status.IDENTICAL:
        return True
    if tolerance is None:
        return False
    if row.status is Status.EQUAL:
        return True
    return row.relative_error is not None and row.relative_error <= tolerance


def compared_kinds(rows: Sequence[ComparedRow]) -> Iterator[ComparedKind]:
    """Sums up the rows of each kind of module in each stack of layers."""
    for stack, kind, members in by_kind(rows, lambda row: row):
        parameters = 0
        identical = 0
        differing = 0
        errors: list[float] = []
        for row in members:
            parameters += row.parameters
            differing += row.differing or 0
            if row.status is Status.IDENTICAL:
                identical += 1
            if row.relative_error is not None:
                errors.append(row.relative_error)
        squared_difference = math.fsum(row.squared_difference or 0.0 for row in members)
        squared_values = math.fsum(row.squared_values or 0.0 for row in members)
        error = relative_error(squared_difference, squared_values) if errors else None
        yield ComparedKind(
            stack=stack,
            kind=kind,
            tensors=len(members),
            parameters=parameters,
            identical=identical,
            differing=differing,
            relative_error=error,
            largest_relative_error=max(errors, default=None),
        )
