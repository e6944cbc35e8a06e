"""Matches the tensors of a checkpoint with those of its source, or of another of one model."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.check.relation import Relation
from nf4conv.check.structure import Structure
from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.experts import Experts
from nf4conv.errors import PlanError, SourceError
from nf4conv.format.dtypes import DTYPE_NAMES, FLOAT_TAGS
from nf4conv.models.experts import find_stack, single_expert
from nf4conv.models.families import families_of, is_transposed, layouts_of, stacked_layouts
from nf4conv.models.module_names import HEADS, module_of
from nf4conv.plan.jobs import CopyJob, PackJob
from nf4conv.plan.joining import join_experts
from nf4conv.plan.writing import WritingPlan
from nf4conv.sources.arranged import StackedExperts
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo

_BUFFERS: Final = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$"
)
"""Tensors that are computed at load time. transformers leaves them out of what it saves."""


@dataclass(frozen=True)
class Comparison:
    """A checkpoint whose headers have been looked at, and what is to be compared with what.

    Attributes:
        structure: the checkpoint, with what is wrong with it so far. Faults of values are added.
        relation: how it says that it was made.
        source: the checkpoint that it is compared with. None if that was not given.
        weights: packed weights, each with how to read what it was made from, and to pack it again.
        copies: tensors of the source, each with that of its name, which is not packed. Encoded ones
            are compared decoded.
        alone: tensors in floats for which there is no source. They are only to be finite.
        alike: as `copies`, of a checkpoint that does not say how it was made.
    """

    structure: Structure
    relation: Relation
    source: Source | None = None
    weights: Sequence[tuple[Bitsandbytes4bit, PackJob]] = ()
    copies: Sequence[tuple[TensorInfo, TensorInfo]] = ()
    alone: Sequence[TensorInfo] = ()
    alike: Sequence[tuple[TensorInfo, TensorInfo]] = ()

    @property
    def bytes_to_read(self) -> int:
        """The bytes of all scales, and with a source those of everything that is compared."""
        count = 0
        for weight in self.structure.weights.values():
            count += weight.nbytes - weight.values.nbytes
        for weight, job in self.weights:
            count += weight.nbytes + job.source_bytes
        for original, tensor in (*self.copies, *self.alike):
            count += original.nbytes + tensor.nbytes
        return count + sum(tensor.nbytes for tensor in self.alone)


def pair(structure: Structure, source: Source) -> Comparison:
    """Finds the counterpart of every tensor of a 4-bit checkpoint; notes those without one."""
    singles = map(single_expert, structure.weights)
    if any(single is not None and single.is_of_unsloth for single in singles):
        raise PlanError(
            f"{structure.folder}: its experts have the names that Unsloth gives them; "
            f"`nf4conv dequantize` makes a model with the names of the source, to compare instead"
        )
    originals = _stacked_like(source, structure.weights)
    by_name = {tensor.name: tensor for tensor in originals}
    weights = tuple(_pair_weights(structure, source, by_name))
    copies = tuple(_pair_copies(structure, by_name))
    total = len(structure.weights) + len(structure.plain)
    if note_foreign(structure, source, len(weights) + len(copies), total):
        return Comparison(structure, Relation.QUANTIZED, source)
    used = {*structure.weights, *structure.plain, *(job.source.name for _, job in weights)}
    for tensor in originals:
        if tensor.name not in used:
            note_missing(structure, tensor, source)
    return Comparison(structure, Relation.QUANTIZED, source, weights, copies)


def pair_decoded(structure: Structure, plan: WritingPlan) -> Comparison:
    """Finds what each tensor of a decoded checkpoint is decoded or copied from, and notes those
    that are not as planned.
    """
    copies = []
    planned = set()
    in_shape = 0
    for job in plan.output.jobs:
        assert isinstance(job, CopyJob)
        planned.add(job.name)
        found = structure.tensors.get(job.name)
        shape = job.source.shape
        if found is None:
            structure.note("names", job.source.file, job.name, "is in the source but not here")
            continue
        in_shape += found.shape == shape
        if (found.dtype, found.shape) != (job.dtype, shape):
            text = (
                f"is {found.dtype} {list(found.shape)}, "
                f"but decoding the source gives {job.dtype} {list(shape)}"
            )
            structure.note("copies", found.file, job.name, text)
        else:
            copies.append((job.source, found))
    if note_foreign(structure, plan.source, in_shape, len(structure.tensors)):
        return Comparison(structure, Relation.DECODED, plan.source)
    for name, tensor in structure.tensors.items():
        if name not in planned:
            structure.note("names", tensor.file, name, "is not in the source")
    return Comparison(structure, Relation.DECODED, plan.source, copies=copies)


def note_foreign(structure: Structure, source: Source, paired: int, total: int) -> bool:
    """Says in one line that a source is another model's, if most tensors have no counterpart in it.

    Then findings about single tensors go, and the answer is True.
    """
    if 2 * paired >= total:
        return False
    kept = [finding for finding in structure.findings if finding.check not in ("names", "copies")]
    structure.findings[:] = kept
    text = (
        f"{source.folder} is not what this was made from: it lacks {total - paired:,} of the "
        f"{total:,} tensors, or has them in other shapes"
    )
    structure.note("source", "", "", text)
    return True


def note_missing(structure: Structure, tensor: TensorInfo, source: Source) -> None:
    """Notes that a tensor of the source is missing; tools may leave out some.

    They are a head that is the embedding, and what is computed.
    """
    is_tied = bool((source.config or {}).get("tie_word_embeddings", True))
    is_tied_head = is_tied and module_of(tensor.name) in HEADS
    is_fault = not is_tied_head and _BUFFERS.search(tensor.name) is None
    text = "is in the source but not here"
    structure.note("names", tensor.file, tensor.name, text, is_fault=is_fault)


def _pair_weights(
    structure: Structure, source: Source, by_name: Mapping[str, TensorInfo]
) -> Iterator[tuple[Bitsandbytes4bit, PackJob]]:
    config = source.config or {}
    stacks = Experts.gather(source.tensors, config)
    experts: dict[str, tuple[TensorInfo, PackedMatrix]] = {}
    for name in stacks.stacks:
        tensor = stacks.tensors[name]
        for matrix in stacks.matrices_of(tensor):
            experts[matrix.name] = tensor, matrix

    for weight in structure.weights.values():
        found = by_name.get(weight.values.name)
        origin = None
        if found is not None:
            origin = _origin_in(found, weight, config)
        elif weight.values.name in experts:
            origin = experts[weight.values.name]
            found = origin[0]
        if origin is None or math.prod(origin[1].shape) != weight.elements:
            text = "is not in the source"
            if found is not None:
                text = (
                    f"was packed from {list(weight.shape)}; "
                    f"the source has {found.dtype} {list(found.shape)}"
                )
            structure.note("names", weight.values.file, weight.values.name, text)
            continue
        yield weight, PackJob(*origin, "stored in 4 bits", weight.format)


def _origin_in(
    tensor: TensorInfo, weight: Bitsandbytes4bit, config: Mapping[str, Any]
) -> tuple[TensorInfo, PackedMatrix] | None:
    """Returns what a weight was packed from, given the tensor of its name; None if it cannot have
    been.
    """
    name, shape = weight.values.name, weight.shape
    if tensor.dtype not in FLOAT_TAGS:
        return None
    if len(shape) == 2 and is_transposed(module_of(name), families_of(config)):
        rows, columns = shape
        if tensor.shape != (columns, rows):
            return None
        return tensor, PackedMatrix(name, (rows, columns), transpose=True)
    if tensor.shape != shape:
        return None
    if len(shape) == 2:
        return tensor, PackedMatrix(name, shape)
    # blocks run over the flat order, whatever the shape
    matrix = PackedMatrix(name, (1, tensor.elements))
    if tensor.encoding is None:
        tensor = tensor._replace(shape=matrix.shape)
    return tensor, matrix


def _pair_copies(
    structure: Structure, by_name: Mapping[str, TensorInfo]
) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    for tensor in structure.plain.values():
        found = by_name.get(tensor.name)
        if found is None:
            structure.note("names", tensor.file, tensor.name, "is not in the source")
        elif found.shape != tensor.shape or not (
            # floats were cast if they differ
            found.dtype == tensor.dtype or {found.dtype, tensor.dtype} <= set(FLOAT_TAGS)
        ):
            text = (
                f"is {tensor.dtype} {list(tensor.shape)}, "
                f"but the source has {found.dtype} {list(found.shape)}"
            )
            structure.note("copies", tensor.file, tensor.name, text)
        else:
            yield found, tensor


# --- two checkpoints, neither of which says how it was made from the other ---------------------


def pair_alike(structure: Structure, out: Source, source: Source) -> Comparison:
    """Matches all tensors by name, and notes those that cannot be compared."""
    originals = _by_name(source, out)
    tensors = _by_name(out, source)
    pairs = []
    for name, original in originals.items():
        tensor = tensors.get(name)
        if tensor is None:
            note_missing(structure, original, source)
        elif tensor.shape != original.shape:
            text = f"is {list(tensor.shape)}, but the source has {list(original.shape)}"
            structure.note("names", tensor.file, name, text)
        else:
            pairs.append((_decoded_for(original, tensor), _decoded_for(tensor, original)))
    for name, tensor in tensors.items():
        if name not in originals:
            structure.note("names", tensor.file, name, "is not in the source")
    if note_foreign(structure, source, len(pairs), len(tensors)):
        pairs = []
    return Comparison(structure, Relation.NONE, source, alike=pairs)


def _by_name(source: Source, other: Source) -> dict[str, TensorInfo]:
    names = {tensor.name for tensor in other.tensors}
    return {tensor.name: tensor for tensor in _stacked_like(source, names)}


def _stacked_like(source: Source, names: Collection[str]) -> Sequence[TensorInfo]:
    """Returns tensors with single experts stacked, if these are names of such stacks."""
    config = source.config or {}
    # what a family stores one by one, other tools stack in a way of their own
    layouts = stacked_layouts(config) or layouts_of(config)
    if not any(find_stack(name, layouts) for name in names):
        return source.tensors
    try:
        joined = join_experts(source.tensors, config, layouts=layouts)
    except SourceError:  # an expert is missing, which the names of single ones show
        return source.tensors
    stacks = [tensor for tensor in joined if isinstance(tensor.encoding, StackedExperts)]
    return joined if any(stack.name in names for stack in stacks) else source.tensors


def _decoded_for(tensor: TensorInfo, other: TensorInfo) -> TensorInfo:
    """Returns a tensor with the dtype that it is decoded to.

    A quantized weight is decoded to the dtype of the plain tensor that it is compared with. By way
    of its own dtype it would be rounded twice.
    """
    is_packed = tensor.is_quantized or isinstance(tensor.encoding, StackedExperts)
    if is_packed and other.encoding is None and other.dtype in DTYPE_NAMES:
        return tensor._replace(dtype=other.dtype)
    return tensor
