"""Keeps what makes an interrupted run go on, in the output's work folder.

    OUT/.nf4conv/calibrated/block-00003.safetensors     the components of its weights in 4 bits
    OUT/.nf4conv/calibrated/outputs-00003.safetensors   second moments of gradients

The metadata of a file hold its record: facts, device, versions; and a digest of all of it. What
does not match is made again.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from nf4conv.calibrate.hidden import bytes_of
from nf4conv.calibrate.rounding.rounded import Rounded
from nf4conv.errors import OutputError, named
from nf4conv.format.layout import Format
from nf4conv.output.writer import write_file

_log: Final = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class KeptFiles:
    """Writes and finds files of tensors, each with some facts.

    Attributes:
        folder: the folder that keeps them.
        made_by: the device and the versions that compute now.
    """

    folder: Path
    made_by: Mapping[str, str]

    def file(self, name: str) -> Path:
        """Returns the file that is kept under a name."""
        return self.folder / f"{name}.safetensors"

    def write(self, name: str, tensors: Tensors, facts: Mapping[str, Any]) -> None:
        """Writes tensors in host memory, no two of which share any, and facts, as JSON values.

        Raises:
            OutputError: they cannot be written.
        """
        record = json.dumps({"made_by": self.made_by, "facts": facts})
        metadata = {"record": record, "sha256": _digest(record, tensors)}
        with named(self.folder, OutputError):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_file(self.file(name), [save(tensors, metadata)])

    def read(self, name: str) -> tuple[Tensors, Any] | None:
        """Returns tensors in host memory, and the facts that were written with them.

        Returns:
            None if they are missing. If they are not what was written, they are removed, and a note
            says that they are made again.

        Raises:
            OutputError: another device or other versions have made them.
        """
        file = self.file(name)
        if not file.is_file():
            return None
        try:
            with safe_open(file, "pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata() or {}
        except (OSError, SafetensorError):
            metadata = {}
        record = metadata.get("record", "")
        if not metadata or metadata.get("sha256") != _digest(record, tensors):
            _log.warning("%s: is not what was written, and is made again", file)
            file.unlink()
            return None
        found = json.loads(record)
        for what, now in self.made_by.items():
            before = found["made_by"].get(what)
            if before != now:
                raise OutputError(
                    f"{self.folder.parent.parent}: calibration has begun with {what} {before}, and "
                    f"this is {now}; go on there, or --overwrite to start anew"
                )
        return tensors, found["facts"]


def _digest(record: str, tensors: Tensors) -> str:
    """Returns the SHA-256 by which a file is known to be what was written."""
    digest = hashlib.sha256(record.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def components_of(weights: Mapping[str, Rounded], format: Format) -> Tensors:
    """Returns copies of the components of weights in host memory, as they are stored, by name."""
    found = {}
    storage = getattr(torch, format.quant_storage)
    for name, rounded in weights.items():
        codes = rounded.packed.view(-1).view(storage)
        found[name] = codes[:, None].to("cpu", copy=True)
        for suffix, tensor in rounded.state.components().items():
            found[f"{name}.{suffix}"] = tensor.to("cpu", copy=True)
    return found


def digest_of_components(tensors: Tensors) -> str:
    """Returns the SHA-256 of what decodes weights; code maps are the same for all."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        if not name.endswith("quant_map"):
            digest.update(bytes_of(tensor))
    return digest.hexdigest()
