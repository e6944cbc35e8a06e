"""Says what a family consists of.

In names, `*` stands for the number of a layer. The name of a module ends before the last dot of a
tensor's name; whole tensors can be named too, where their endings differ.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nf4conv.sources.gguf.header import GgufTensor

FLAT: Final = "flat"
"""Vectors that the converter gave more dimensions."""

SCALAR: Final = "scalar"
"""Numbers that the converter stored as vectors of one."""

CHANNELS: Final = "channels"
"""Convolutions of single channels: [channels, 1, width], which the converter stored without 1."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor of the file.

    Attributes:
        tensor: the part.
        change: what the converter did to it, a word of format/gguf.py; None if nothing.
        heads: the number of heads that the change moves rows or columns of; of TILED, of key heads.
        shared: the number of value heads that share a key head, for TILED.
    """

    tensor: GgufTensor
    change: str | None = None
    heads: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Stack:
    """A tensor of transformers that is put together from pieces.

    Attributes:
        groups: the matrices of each expert or head, whose rows follow each other.
        shape: the shape of the tensor.
        is_transposed: True if it has the transpose of each group.
        is_interleaved: True if the rows of the matrices of a group alternate.
    """

    groups: tuple[tuple[Piece, ...], ...]
    shape: tuple[int, ...]
    is_transposed: bool = False
    is_interleaved: bool = False


PutTogether = Callable[[Sequence[GgufTensor], Mapping[str, Any]], Stack]
"""Makes a stack of tensors, given the sizes that the metadata names."""


@dataclass(frozen=True)
class Join:
    """A tensor of transformers that the converter took apart.

    Attributes:
        name: the name of the tensor in transformers.
        parts: the names of the tensors in the file.
        put_together: makes the stack of these tensors; it raises a ValueError that says what does
            not fit.
    """

    name: str
    parts: tuple[str, ...]
    put_together: PutTogether


Sign = Callable[[Mapping[str, Any], Collection[str]], bool]
"""Tells whether a file is of a family, given the same as a `Completion`."""

Completion = Callable[[Mapping[str, Any], Collection[str], dict[str, Any]], None]
"""Completes config.json, given the metadata without the architecture's name in its keys, and the
names of the tensors."""


@dataclass(frozen=True)
class GgufFamily:
    """An architecture of llama.cpp, and the model of transformers that it stands for.

    Attributes:
        model_type: in config.json.
        architecture: the class in config.json.
        names: the name of a module in transformers by its name in the file.
        experts: the same for stacks of experts; `#` stands for the number of an expert.
        joined: tensors that are several in the file.
        changed: what the converter did to a module, by its name in the file: one of the words
            of format/gguf.py.
        shapes: how transformers shapes a tensor otherwise, by its name in the file: FLAT,
            SCALAR or CHANNELS.
        config: the key of config.json by the key of the metadata, without the architecture.
        constants: what config.json has besides.
        shown: keys of config.json that are True if the file has a tensor, and the tensor's name in
            the file.
        rows: keys of config.json that are the rows of a tensor, and its name in transformers.
        complete: functions that complete config.json.
        marker: a tensor or a key of the metadata that only files of this family have, where
            llama.cpp gives several families one name.
        sign: tells whether a file is of this family, where no single tensor or key tells it.
        also: other model types whose config goes with such a file.
        is_encoder: True if tokens see those behind them, at least in a part of the model.
        refusal: why no such file can be read: what follows "GGUF of a … model"; usually nothing.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    joined: tuple[Join, ...] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    complete: tuple[Completion, ...] = ()
    marker: str = ""
    sign: Sign | None = None
    also: tuple[str, ...] = ()
    is_encoder: bool = False
    refusal: str = ""

    def is_meant(self, sizes: Mapping[str, Any], names: Collection[str]) -> bool:
        """Returns True if a file is of this family, and not of others with the same name.

        Args:
            sizes: the metadata without the architecture's name in its keys.
            names: the names of the tensors, also with `*` for the number of a layer.
        """
        if self.sign is not None:
            return self.sign(sizes, names)
        return not self.marker or self.marker in names or bool(sizes.get(self.marker))
