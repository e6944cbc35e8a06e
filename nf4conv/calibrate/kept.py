"""Keeps what makes an interrupted run go on, in the output's work folder.

    OUT/.nf4conv/calibrated/block-00003.safetensors   the components of its weights in 4 bits
    OUT/.nf4conv/calibrated/block-00003.json          its record: digests, gains, device, versions
    OUT/.nf4conv/calibrated/outputs-00003.…           second moments of gradients, likewise

The record is written last, and holds the digest of the tensors and one of itself. What does not
match is removed and made again.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from nf4conv.calibrate.hidden import bytes_of
from nf4conv.calibrate.rounding import Rounded
from nf4conv.errors import OutputError, SourceError, named
from nf4conv.format.dtypes import STORAGE_DTYPES
from nf4conv.format.layout import Format, components
from nf4conv.output.writer import write_file
from nf4conv.sources.header import LENGTH_BYTES, build_header, parse_header, read_header
from nf4conv.sources.reader import read_small
from nf4conv.sources.tensors import TensorInfo
from nf4conv.system.folders import is_link, remove

_TAGS: Final = {getattr(torch, name): tag for tag, name in STORAGE_DTYPES.items()}
_DTYPES: Final = {tag: dtype for dtype, tag in _TAGS.items()}

_DIGEST: Final = "sha256 of this record"

_log: Final = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


class KeptFiles:
    """Writes and finds files of tensors, each with a record.

    Args:
        folder: the folder that keeps them.
        made_by: the device and the versions that compute now.
    """

    def __init__(self, folder: Path, made_by: Mapping[str, str]) -> None:
        self.folder = folder
        self._made_by = dict(made_by)

    def file(self, name: str) -> Path:
        """Returns the file with the tensors that are kept under a name."""
        return self.folder / f"{name}.safetensors"

    def write(self, name: str, tensors: Tensors, facts: Mapping[str, Any]) -> None:
        """Writes tensors, then their record with some facts, as JSON values.

        Raises:
            OutputError: they cannot be written.
        """
        with named(self.folder, OutputError):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._remove(name)  # whatever stands there, a folder even
        digest = hashlib.sha256()
        write_file(self.file(name), _digested(_chunks(tensors), digest))
        record = {"sha256": digest.hexdigest(), "made_by": self._made_by, "facts": facts}
        content = json.dumps({**record, _DIGEST: _digest_of(record)})
        write_file(self._record(name), [content.encode()])

    def read(self, name: str, parse: Callable[[Any], Any] = dict) -> tuple[Tensors, Any] | None:
        """Returns tensors in host memory, and what `parse` makes of the facts in their record.

        It raises ValueError, TypeError or KeyError if they are none.

        Returns:
            None if they are missing. If they are not what was written, they are removed, and a note
            says that they are made again.

        Raises:
            OutputError: another device or other versions have made them, or what is there in their
                place cannot be removed.
        """
        paths = (self.file(name), self._record(name))
        if not any(path.exists() or is_link(path) for path in paths):
            return None
        try:
            for path in paths:
                if is_link(path) or not path.is_file():
                    raise ValueError("is no file")
            record = json.loads(read_small(paths[1]))
            digest = record.pop(_DIGEST)
            content = bytearray(paths[0].read_bytes())
            is_intact = digest == _digest_of(record)
            is_intact &= hashlib.sha256(content).hexdigest() == record["sha256"]
            tensors = _tensors(content, paths[0]) if is_intact else None
            facts, made_by = parse(record["facts"]), dict(record["made_by"])
        except (OSError, SourceError, ValueError, TypeError, KeyError, AttributeError):
            tensors = None  # whatever stands there
        if tensors is None:
            if self._record(name).exists():
                _log.warning("%s: is not what was written, and is made again", paths[0])
            self._remove(name)
            return None
        self._require_same_maker(made_by)
        return tensors, facts

    def tensors(self, name: str) -> dict[str, TensorInfo]:
        """Returns where the tensors of a file are, by their names."""
        return {tensor.name: tensor for tensor in read_header(self.file(name))}

    def _record(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _remove(self, name: str) -> None:
        """Removes whatever stands in the place of a file and its record."""
        with named(self.folder, OutputError):
            remove(self.folder, self.file(name).name)
            remove(self.folder, self._record(name).name)

    def _require_same_maker(self, before: Mapping[str, str]) -> None:
        for what, now in self._made_by.items():
            if before.get(what) != now:
                raise OutputError(
                    f"{self.folder.parent.parent}: calibration has begun with {what} "
                    f"{before.get(what)}, and this is {now}; go on there, or --overwrite to start "
                    f"anew"
                )


def _digest_of(record: Mapping[str, Any]) -> str:
    """Returns a digest by which a record is known to be what was written."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _digested(chunks: Iterator[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
    """Yields chunks, and adds each to a digest."""
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def _chunks(tensors: Tensors) -> Iterator[bytes]:
    """Yields the bytes of a safetensors file."""
    entries = []
    position = 0
    for name, tensor in tensors.items():
        stop = position + tensor.nbytes
        entries.append((name, _TAGS[tensor.dtype], tuple(tensor.shape), position, stop))
        position = stop
    yield build_header(entries)
    for tensor in tensors.values():
        yield bytes(bytes_of(tensor))


def _tensors(content: bytearray, path: Path) -> Tensors:
    """Returns the tensors of a safetensors file."""
    length = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    found = {}
    for tensor in parse_header(bytes(content[LENGTH_BYTES:length]), path, len(content)):
        part = torch.frombuffer(
            content, dtype=torch.uint8, offset=tensor.start, count=tensor.nbytes
        )
        # a copy is aligned
        found[tensor.name] = part.clone().view(_DTYPES[tensor.dtype]).view(tensor.shape)
    return found


def components_of(weights: Mapping[str, Rounded], format: Format) -> Tensors:
    """Returns the components of weights, as they are stored, by their names."""
    found = {}
    for name, rounded in weights.items():
        codes = rounded.packed.view(-1).view(_DTYPES[format.storage_tag])
        found[name] = codes[:, None]
        for suffix, tensor in rounded.state.components().items():
            found[f"{name}.{suffix}"] = tensor
    return found


def digest_of_components(tensors: Tensors) -> str:
    """Returns the SHA-256 of what decodes weights; code maps are the same for all."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        if not name.endswith("quant_map"):
            digest.update(bytes_of(tensor))
    return digest.hexdigest()


def names_of_components(name: str, format: Format, shape: tuple[int, ...]) -> dict[str, str]:
    """Returns the names of a weight's components by their suffixes; that of the codes is empty."""
    found = {}
    for part in components(format, shape):
        found[part.suffix] = f"{name}.{part.suffix}" if part.suffix else name
    return found
