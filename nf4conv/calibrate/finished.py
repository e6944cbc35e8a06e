"""Keeps finished blocks in the output's work folder: what makes an interrupted run go on.

    OUT/.nf4conv/calibrated/block-00003.safetensors   the components of its weights in 4 bits
    OUT/.nf4conv/calibrated/block-00003.json          its record: digest, gains, device, versions

The record is written last: without it a block is not finished.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from nf4conv.calibrate.rounding import Rounded
from nf4conv.errors import OutputError, SourceError, named
from nf4conv.format.layout import ITEMSIZES, Format, components
from nf4conv.output.writer import write_file
from nf4conv.sources.header import build_header, read_header
from nf4conv.sources.reader import digest_of, read_small
from nf4conv.sources.stored_weights import split_component
from nf4conv.sources.tensors import TensorInfo

_TAGS: Final = {"torch.float32": "F32", "torch.uint8": "U8"}


@dataclass(frozen=True)
class WeightGain:
    """Says what calibration gained for one weight.

    Attributes:
        gain: the error of the layer's outputs on windows that did not calibrate, relative to the
            error with searched scales. 1 for a weight that keeps the searched scales.
        tokens: the number of tokens that reached the weight, if that is too few. Otherwise None.
    """

    gain: float
    tokens: int | None = None


@dataclass(frozen=True)
class BlockRecord:
    """Records a finished block.

    Attributes:
        sha256: the SHA-256 of the file with its weights.
        components_sha256: the SHA-256 of the bytes of all components except the code maps, weight
            after weight.
        gains: what was gained for each weight, by its name.
        made_by: the device and the versions that calibrated the block.
    """

    sha256: str
    components_sha256: str
    gains: Mapping[str, WeightGain]
    made_by: Mapping[str, str]


class FinishedBlocks:
    """Writes and finds finished blocks.

    Args:
        folder: the folder that keeps them.
        format: the format of the weights.
    """

    def __init__(self, folder: Path, format: Format) -> None:
        self.folder = folder
        self._format = format

    def file(self, number: int) -> Path:
        """Returns the file with the weights of a block."""
        return self.folder / f"block-{number:05d}.safetensors"

    def _record_file(self, number: int) -> Path:
        return self.file(number).with_suffix(".json")

    def write(
        self,
        number: int,
        weights: Mapping[str, Rounded],
        gains: Mapping[str, WeightGain],
        made_by: Mapping[str, str],
    ) -> None:
        """Writes a block, then its record.

        Args:
            number: the number of the block.
            weights: its weights, by name.
            gains: what was gained for each weight, by its name.
            made_by: the device and the versions that calibrated the block.

        Raises:
            OutputError: they cannot be written.
        """
        with named(self.folder, OutputError):
            self.folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        chunks = list(self._chunks(weights))
        for chunk in chunks:
            digest.update(chunk)
        write_file(self.file(number), chunks)
        components = self._digest_of_components(weights)
        record = BlockRecord(digest.hexdigest(), components, gains, made_by)
        write_file(self._record_file(number), [json.dumps(asdict(record)).encode()])

    def _chunks(self, weights: Mapping[str, Rounded]) -> Iterator[bytes]:
        """Yields the bytes of a safetensors file."""
        entries = []
        contents = []
        position = 0
        for name, rounded in weights.items():
            for part, shape, tag, content in self._parts(rounded):
                stop = position + len(content)
                whole = f"{name}.{part}" if part else name
                entries.append((whole, tag, shape, position, stop))
                contents.append(content)
                position = stop
        yield build_header(entries)
        yield from contents

    def _digest_of_components(self, weights: Mapping[str, Rounded]) -> str:
        """Returns the SHA-256 of what decodes weights; code maps are the same for all."""
        digest = hashlib.sha256()
        for rounded in weights.values():
            for suffix, _, _, content in self._parts(rounded):
                if not suffix.endswith("quant_map"):
                    digest.update(content)
        return digest.hexdigest()

    def _parts(self, rounded: Rounded) -> Iterator[tuple[str, tuple[int, ...], str, bytes]]:
        """Yields suffix, shape, dtype and bytes of every component of a weight."""
        tag = self._format.storage_tag
        codes = rounded.packed.cpu().numpy().tobytes()
        yield "", (len(codes) // ITEMSIZES[tag], 1), tag, codes
        for suffix, tensor in rounded.state.components().items():
            content = tensor.cpu().numpy().tobytes()
            yield suffix, tuple(tensor.shape), _TAGS[str(tensor.dtype)], content

    def record(self, number: int) -> BlockRecord | None:
        """Returns the record of a block whose weights are what was written; None if there is none.

        Reads the whole file.
        """
        try:
            content = json.loads(read_small(self._record_file(number)))
            gains = {name: WeightGain(**gain) for name, gain in content["gains"].items()}
            record = BlockRecord(
                content["sha256"], content["components_sha256"], gains, content["made_by"]
            )
            if digest_of(self.file(number)) != record.sha256:
                return None
        except (OSError, SourceError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return record

    def components(self, number: int) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the components of a block's weights in host memory, by weight and suffix."""
        content = self.file(number).read_bytes()
        found: dict[str, dict[str, torch.Tensor]] = {}
        for tensor in read_header(self.file(number)):
            owner, suffix = split_component(tensor.name)
            raw = torch.frombuffer(
                bytearray(content[tensor.start : tensor.stop]), dtype=torch.uint8
            )
            values = raw.view(torch.float32) if suffix and tensor.dtype == "F32" else raw
            found.setdefault(owner, {})[suffix] = values
        return found

    def tensors(self, number: int) -> dict[str, TensorInfo]:
        """Returns the components of a block's weights by their names."""
        return {tensor.name: tensor for tensor in read_header(self.file(number))}


def names_of_components(name: str, format: Format, shape: tuple[int, ...]) -> dict[str, str]:
    """Returns the names of a weight's components by their suffixes; that of the codes is empty."""
    found = {}
    for part in components(format, shape):
        found[part.suffix] = f"{name}.{part.suffix}" if part.suffix else name
    return found


def size_of(format: Format, shapes: list[tuple[int, ...]]) -> int:
    """Returns the most bytes that the components of weights take."""
    total = 0
    for shape in shapes:
        total += sum(part.nbytes for part in components(format, shape))
    return total
