"""The safetensors header: parse, validate, build.

A file is 8 bytes N (little endian), N bytes of JSON and the data:

    {"__metadata__": {"format": "pt"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}

Offsets count from the end of the JSON; tensors must cover the data without holes or overlap; the JSON may be padded
with spaces (https://github.com/huggingface/safetensors#format).
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file, as its header tells it.

    Attributes:
        name: key in the state dict.
        dtype: safetensors' dtype tag: "BF16", "F16", "F32", "F8_E4M3", "U8", …
        shape: sizes, outermost first.
        file: the file that holds it.
        start: where its bytes begin in that file, from the file's first byte.
        stop: where they end.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start
