"""Makes a deep checkpoint of a shallow one: each layer has the bytes of the first.

A mixture whose layers are all alike computes as long as another, and is written in seconds.
"""

import json
import mmap
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST = "model.layers.0."


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        data: its bytes.
        dtype: as a header of safetensors names it.
        shape: of the tensor.
    """

    data: memoryview
    dtype: str
    shape: list[int]


def repeat_layers(shallow: Path, deep: Path, layers: int) -> None:
    """Writes a checkpoint with the first layer of another so many times, a file for each."""
    deep.mkdir()
    tensors: dict[str, Stored] = {}
    for path in sorted(shallow.glob("*.safetensors")):
        tensors |= _tensors_of(path)
    first = [name for name in tensors if name.startswith(FIRST)]
    rest = [name for name in tensors if not name.startswith("model.layers.")]
    files = {"rest.safetensors": {name: tensors[name] for name in rest}}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        own = {prefix + name.removeprefix(FIRST): tensors[name] for name in first}
        files[f"layer-{layer:03}.safetensors"] = own
    with ThreadPoolExecutor(8) as threads:
        paths = [deep / name for name in files]
        list(threads.map(_write, paths, files.values()))
    weight_map = {}
    for file, names in files.items():
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (deep / "model.safetensors.index.json").write_text(json.dumps(index))
    _write_config(shallow, deep, layers)


def _tensors_of(path: Path) -> dict[str, Stored]:
    """Maps a file, and returns its tensors by name."""
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(bytes(data[8:start]))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = Stored(data[start + begin : start + end], entry["dtype"], entry["shape"])
    return tensors


def _write(path: Path, tensors: dict[str, Stored]) -> None:
    """Writes a file of tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in tensors.items():
        offsets = [end, end + len(stored.data)]
        header[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": offsets}
        end = offsets[1]
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    with path.open("wb", buffering=1 << 24) as file:
        file.write(len(blob).to_bytes(8, "little") + blob)
        for stored in tensors.values():
            file.write(stored.data)


def _write_config(shallow: Path, deep: Path, layers: int) -> None:
    """Writes the config of a checkpoint with so many layers, and copies what else is there."""
    config = json.loads((shallow / "config.json").read_text())
    config["num_hidden_layers"] = layers
    kinds = config.get("layer_types")
    if kinds:
        config["layer_types"] = [kinds[layer % 2] for layer in range(layers)]
    (deep / "config.json").write_text(json.dumps(config))
    generation = shallow / "generation_config.json"
    if generation.exists():
        shutil.copy(generation, deep)
