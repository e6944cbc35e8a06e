"""Proves that calibrated weights are what was written.

No second rounding gives the same bytes: they depend on text, device and versions. So nf4conv.json
holds a SHA-256 for each block, of what decodes its weights: codes, absmax, nested absmax and quant
state, weight after weight in the order of the record.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from nf4conv.check.pairing import Pairs
from nf4conv.check.structure import Structure
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, is_in_4_bits
from nf4conv.sources.reader import read_chunks
from nf4conv.sources.record import MAKING, recorded_calibration


def check_calibrated(structure: Structure, pairs: Pairs, workers: int) -> None:
    """Notes calibrated weights that are not what was written, or of which nothing is known.

    Such as the source has in 4 bits are compared byte by byte, and need no proof.
    """
    unproved = set()
    for pair in pairs.weights:
        if pair.weight.format.scales == "calibrated" and not is_in_4_bits(pair.job.source):
            unproved.add(pair.weight.values.name)
    if not unproved:
        return
    blocks = []
    for block in recorded_calibration(structure.record).blocks:
        weights = [structure.weights[name] for name in block.gains if name in structure.weights]
        if weights and len(weights) == len(block.gains):  # what is missing is noted elsewhere
            blocks.append((block.sha256, weights))
            unproved.difference_update(block.gains)
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
        for role in ("values", "absmax", "nested_absmax", weight.quant_state_role):
            if role in parts:
                part = parts[role]
                for chunk in read_chunks(part.file, part.start, part.stop):
                    digest.update(chunk)
    return digest.hexdigest()
