"""Says why a result is larger than expected, and which option would make it smaller."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from nf4conv.format.units import size
from nf4conv.plan.rows import PlanRow

_MANY_BITS: Final = 6.0
"""Bits per parameter: half as much again as a checkpoint that has only linear layers."""

_TABLES: Final = 5.0
"""Bits per packed parameter; only small weights take more, for their tables."""

_REMEDIES: Final = {
    "--moe packed": "--moe packed",
    "by the user": "packing what --include and --exclude leave out",
}
"""What would pack tensors that are kept, by words in the reason for keeping them."""


def little_saved(rows: Sequence[PlanRow]) -> str:
    """Warns before a run that its result will be little smaller than its source.

    Args:
        rows: what becomes of each tensor.

    Returns:
        A line for the user: why, and what would save more. Empty if a third is saved or more, and
        if the source is in 4 bits already and does not grow by a tenth.
    """
    before = sum(row.bytes_before for row in rows)
    after = sum(row.bytes_after for row in rows)
    if 3 * after <= 2 * before or (10 * after <= 11 * before and _is_in_4_bits(rows)):
        return ""
    kept = [row for row in rows if row.action not in ("pack", "stay")]
    kept_bytes = sum(row.bytes_after for row in kept)
    if after > before:
        text = f"the result is larger than its source: {size(before)} → {size(after)}"
    else:
        text = f"this saves only {_percent(before - after, before)} of {size(before)}"
    packed = [row for row in rows if row.action == "pack"]
    if 2 * kept_bytes <= after and _bits(packed, sum(row.bytes_after for row in packed)) < _TABLES:
        bits = _bits(packed, sum(row.bytes_before for row in packed))
        return f"{text}: what is packed took {bits:.1f} bits per weight before"
    if 2 * kept_bytes <= after:
        return f"{text}: most weights are small, and the tables of each take about 1 kB"
    text += f": {size(kept_bytes)} are not packed, most of it {_culprit(kept)}"
    remedy, saved = _remedy(rows, kept)
    if 20 * saved < after:
        return f"{text}; no option saves much more"
    return f"{text}; {remedy} would make it {size(after - saved)}"


def _is_in_4_bits(rows: Iterable[PlanRow]) -> bool:
    """Returns True if what becomes 4-bit takes few bits in the source, too."""
    packed = [row for row in rows if row.action in ("pack", "stay")]
    return _bits(packed, sum(row.bytes_before for row in packed)) <= _MANY_BITS


def _bits(rows: Sequence[PlanRow], size: int) -> float:
    """Returns how many bits a parameter of these rows has, if they take so many bytes."""
    return 8 * size / max(sum(row.parameters for row in rows), 1)


def _remedy(rows: Iterable[PlanRow], kept: Iterable[PlanRow]) -> tuple[str, int]:
    """Returns what would save most of the tensors that are kept, and how many bytes, roughly."""
    packed = [row for row in rows if row.action == "pack"]
    parameters = sum(row.parameters for row in packed)
    bytes_each = sum(row.bytes_after for row in packed) / max(parameters, 1)
    saved = {"--dtype bfloat16": _saved_by_16_bits(kept)}
    for row in kept:
        for words, remedy in _REMEDIES.items():
            if words in row.reason:
                saving = row.bytes_after - int(row.parameters * bytes_each)
                saved[remedy] = saved.get(remedy, 0) + saving
    return max(saved.items(), key=lambda found: found[1])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"


def advice(rows: Iterable[PlanRow]) -> str:
    """Says why a result has many bits per parameter, and what would change that.

    Args:
        rows: what becomes of each tensor.

    Returns:
        A line for the user; empty if the result has few bits per parameter, or if it is not the
        tensors that are kept that take most of them.
    """
    parameters = 0
    stored = 0
    kept: list[PlanRow] = []
    for row in rows:
        parameters += row.parameters
        stored += row.bytes_after
        if row.action not in ("pack", "stay"):
            kept.append(row)
    kept_bytes = sum(row.bytes_after for row in kept)
    if 8 * stored <= _MANY_BITS * parameters or 2 * kept_bytes <= stored:
        return ""
    kept_parameters = sum(row.parameters for row in kept)
    text = (
        f"{_millions(kept_parameters)} of {_millions(parameters)} parameters are not packed "
        f"and take {size(kept_bytes)} of {size(stored)}, most of it {_culprit(kept)}"
    )
    saved = _saved_by_16_bits(kept)
    if 5 * saved < stored:
        return text
    bits = 8 * (stored - saved) / parameters
    return (
        f"{text}; --dtype bfloat16 would store them in 16 bits and give {bits:.2f} bits per "
        f"parameter"
    )


def _culprit(kept: Sequence[PlanRow]) -> str:
    """Names what takes most of the bytes that are kept: one tensor, or all that share a reason."""
    total = 0
    by_reason: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for row in kept:
        total += row.bytes_after
        by_reason[row.reason] += row.bytes_after
        tensors[row.reason] += 1
    largest = max(kept, key=lambda row: row.bytes_after)
    if 2 * largest.bytes_after >= total:
        return f"{largest.name} ({largest.reason})"
    ((reason, taken),) = by_reason.most_common(1)
    return f"{tensors[reason]:,} tensors of {size(taken)} ({reason})"


def _saved_by_16_bits(kept: Iterable[PlanRow]) -> int:
    """Returns the bytes that 16 bits would save of tensors that are kept in 32 or 64 bits."""
    wide = 0
    for row in kept:
        if row.action == "copy" and row.dtype in ("F32", "F64"):
            wide += row.bytes_after
    return wide // 2


def _millions(count: int) -> str:
    if count >= 10**9:
        return f"{count / 10**9:.2f} B"
    return f"{count / 10**6:.1f} M"
