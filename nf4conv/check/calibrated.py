"""Proves that calibrated weights are what was written.

No second rounding gives the same bytes: they depend on text, device and versions. So nf4conv.json
holds a SHA-256 for each block, of what decodes its weights: codes, absmax, nested absmax and quant
state, weight after weight in the order of the record.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from nf4conv.check.pairing import Pairs
from nf4conv.errors import SourceError, named
from nf4conv.sources.encodings.types.bitsandbytes import is_in_4_bits
from nf4conv.sources.record import MAKING
from nf4conv.sources.stored_weights import StoredWeight, Structure
from nf4conv.sources.tensors import TensorInfo

_CHUNK: Final = 2**22  # bytes that are read at a time


def check_calibrated(structure: Structure, pairs: Pairs) -> None:
    """Notes calibrated weights that are not what was written, or of which nothing is known.

    Args:
        structure: the checkpoint, which gets the findings.
        pairs: its weights with those of the source. Such as the source has in 4 bits are compared
            byte by byte, and need no proof.

    Raises:
        SourceError: a file cannot be read.
    """
    calibrated = set()
    for pair in pairs.weights:
        if pair.weight.format.scales == "calibrated" and not is_in_4_bits(pair.job.source):
            calibrated.add(pair.weight.name)
    for block in _recorded_blocks(structure):
        names = [name for name in block["gains"] if name in structure.weights]
        if len(names) < len(block["gains"]):
            continue  # that weights are missing is noted elsewhere
        weights = [structure.weights[name] for name in names]
        if _digest(weights) != block["sha256"]:
            text = f"the bytes of its block are not those that {MAKING} has the SHA-256 of"
            structure.note("exact", weights[0].values.file, names[0], text)
        calibrated.difference_update(names)
    for name in sorted(calibrated)[:1]:
        text = f"was calibrated, and {MAKING} does not say to what: --exact cannot prove it"
        structure.note("exact", structure.weights[name].values.file, name, text)


def _recorded_blocks(structure: Structure) -> Iterator[Mapping[str, Any]]:
    """Yields what nf4conv.json says of calibrated blocks."""
    record = structure.record or {}
    found = record.get("calibrated")
    blocks = found.get("blocks") if isinstance(found, dict) else None
    if not isinstance(blocks, list):
        return
    for block in blocks:
        if isinstance(block, dict) and isinstance(block.get("gains"), dict) and block["gains"]:
            yield {"sha256": block.get("sha256"), "gains": block["gains"]}


def _digest(weights: list[StoredWeight]) -> str:
    """Returns the SHA-256 of what decodes weights; code maps are the same for all."""
    digest = hashlib.sha256()
    for weight in weights:
        parts = weight.parts()
        state = next((suffix for suffix in parts if suffix.startswith("quant_state")), "")
        for role in ("values", "absmax", "nested_absmax", state):
            if role in parts:
                for chunk in _chunks(parts[role]):
                    digest.update(chunk)
    return digest.hexdigest()


def _chunks(tensor: TensorInfo) -> Iterator[bytes]:
    """Yields the bytes of a tensor."""
    with named(tensor.file, SourceError), tensor.file.open("rb") as file:
        file.seek(tensor.start)
        left = tensor.nbytes
        while left:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                return
            left -= len(chunk)
            yield chunk
