"""Compares what nf4conv.json says with what is stored: formats and numbers of weights, numbers of
tensors that are not packed, and the digests of weights that are calibrated.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from nf4conv.check.pairing import Comparison
from nf4conv.check.structure import Structure
from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, is_in_4_bits
from nf4conv.sources.reader import read_chunks
from nf4conv.sources.record import (
    MAKING,
    group_finder,
    headers_digest,
    recorded_blocks,
    recorded_weights,
)
from nf4conv.sources.source import Source

CHECK: Final = "record"

_OF_FORMAT: Final = ("quant_type", "blocksize", "double_quant", "quant_storage", "dtype")


def check_record(structure: Structure) -> None:
    """Notes everything that nf4conv.json says of the stored tensors and that is not so."""
    record = structure.record
    if record is None:
        if (structure.folder / MAKING).is_file():
            text = "is no record that can be read"
            structure.note(CHECK, MAKING, "", text, is_fault=structure.exact)
        elif structure.exact and structure.weights:
            text = "no record: made by another tool, compared with what quantizing gives"
            structure.note(CHECK, "", "", text, is_fault=False)
        return
    if "not_packed" not in record:  # release 0.1.0 said nothing of tensors
        return
    for text in (*_wrong_groups(structure, record), *_wrong_counts(structure, record)):
        structure.note(CHECK, MAKING, "", text)


def check_origin(structure: Structure, source: Source) -> None:
    """Notes a record that the checkpoint was made from other tensors than those of the source."""
    record = structure.record
    if record is None or record["source"].get("headers_sha256") == headers_digest(source):
        return
    made_from = record["source"].get("id")
    text = f"it was made from {made_from}, whose tensors are not those of the source given"
    structure.note("names", MAKING, "", text, is_fault=False)


def _wrong_groups(structure: Structure, record: Mapping[str, Any]) -> Iterator[str]:
    """Yields what groups of weights say that is not so."""
    groups = recorded_weights(record)
    group_of = group_finder(groups)
    counts = Counter[int | None]()
    for name, weight in structure.weights.items():
        number = group_of(name)
        said = {} if number is None else groups[number]
        counts[number] += 1
        for field in _OF_FORMAT:
            claimed = said.get(field)
            stored = getattr(weight.format, field)
            if claimed != stored:
                yield f"{name}: {field} is {claimed!r:.50}, but it is stored as {stored!r}"
                return  # one says it: a checkpoint may have thousands
    for number, group in enumerate(groups):
        claimed, stored = group.get("count"), counts[number]
        if claimed != stored:
            yield f"group {number + 1} has {claimed!r:.50} weights, but {stored:,} are there"


def _wrong_counts(structure: Structure, record: Mapping[str, Any]) -> Iterator[str]:
    """Yields a difference in the numbers of tensors that are not packed."""
    stored = Counter(
        DTYPE_NAMES.get(tensor.dtype, tensor.dtype) for tensor in structure.plain.values()
    )
    claimed = record.get("not_packed")
    if claimed != dict(stored):
        yield f"not_packed is {claimed!r:.100}, but {dict(sorted(stored.items()))} are there"


def check_calibrated(pairs: Comparison, workers: int) -> None:
    """Notes calibrated weights that are not what was written, or of which nothing is known.

    No second rounding gives the same bytes: they depend on text, device and versions. So the record
    holds a SHA-256 for each block, of what decodes its weights in their order. Such as the source
    has in 4 bits are compared byte by byte, and need no proof.
    """
    structure = pairs.structure
    unproved = set()
    for weight, job in pairs.weights:
        if weight.format.scales == "calibrated" and not is_in_4_bits(job.source):
            unproved.add(job.name)
    if not unproved:
        return
    blocks = []
    for expected, names in recorded_blocks(structure.record):
        weights = [structure.weights[name] for name in names if name in structure.weights]
        if weights and len(weights) == len(names):  # what is missing is noted elsewhere
            blocks.append((expected, weights))
            unproved.difference_update(names)
    with ThreadPoolExecutor(workers) as pool:
        digests = pool.map(_digest, [weights for _, weights in blocks])
        for (expected, weights), digest in zip(blocks, digests, strict=True):
            if digest != expected:
                text = f"the bytes of its block are not those that {MAKING} has the SHA-256 of"
                structure.note("calibrated", weights[0].values.file, weights[0].values.name, text)
    for name in sorted(unproved)[:1]:  # one says it: a checkpoint may have thousands
        text = f"was calibrated, and {MAKING} does not say to what: its bytes cannot be proved"
        structure.note("calibrated", structure.weights[name].values.file, name, text)


def _digest(weights: Sequence[Bitsandbytes4bit]) -> str:
    """Returns the SHA-256 of what decodes weights; code maps are the same for all."""
    digest = hashlib.sha256()
    for weight in weights:
        parts = dict(weight.parts)
        for role in ("values", "absmax", "nested_absmax", "quant_state"):
            if role in parts:
                part = parts[role]
                for chunk in read_chunks(part.file, part.start, part.stop):
                    digest.update(chunk)
    return digest.hexdigest()
