"""Writes the files beside the weights: the index, the card, nf4conv.json, and config.json last."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nf4conv.output.folder import OutputFolder
from nf4conv.sources.record import MAKING, as_bytes


@dataclass(frozen=True)
class LastFiles:
    """Holds what makes a folder with finished shards a checkpoint."""

    # index of the weight files by its name, see `index_of`
    index: Mapping[str, bytes]
    # content of README.md; None for a result without a card
    card: str | None
    # content of nf4conv.json
    record: Mapping[str, Any]
    # content of config.json; None for a result without one
    config: bytes | None
    # what verification measured, for nf4conv.json; None if nothing was verified
    verified: Mapping[str, Any] | None = field(default=None, kw_only=True)


def index_of(stem: str, total: int, files: Mapping[str, str]) -> dict[str, bytes]:
    """Returns the index of sharded weights by its file name; nothing for a single file."""
    if len(set(files.values())) <= 1:
        return {}
    weight_map = dict(sorted(files.items()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, ensure_ascii=False)
    name = f"{stem}.safetensors.index.json"
    return {name: f"{text}\n".encode()}


def finish(folder: OutputFolder, last: LastFiles) -> None:
    """Writes the last files of a folder whose shards are all there."""
    for name, content in last.index.items():
        folder.write(name, content)
    if last.card is not None:
        folder.write("README.md", last.card.encode(errors="backslashreplace"))
    record = dict(last.record)
    if last.verified is not None:
        record["verified"] = last.verified
    folder.write(MAKING, as_bytes(record))
    folder.complete({} if last.config is None else {"config.json": last.config})
