"""Matches the tensors of a checkpoint with those of its source, or of another of one model."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from nf4conv.check.structure import Structure
from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.experts import Experts
from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_BITS, DTYPE_NAMES, FLOAT_TAGS
from nf4conv.models.experts import ROUTER_OF_UNSLOTH, find_stack, single_expert
from nf4conv.models.families import families_of, is_gpt_oss, is_transposed, layouts_of
from nf4conv.models.module_names import HEADS, module_of
from nf4conv.plan.dequantization import DequantizationPlan
from nf4conv.plan.jobs import CopyJob, PackJob, footprint
from nf4conv.plan.joining import join_experts
from nf4conv.sources.arranged import StackedExperts, Strided
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.foreign.floats import Fp4, Scaled
from nf4conv.sources.foreign.fp8 import Fp8Values
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo

_BUFFERS: Final = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$"
)
"""Tensors that are computed at load time. transformers leaves them out of what it saves."""


class PackedPair(NamedTuple):
    """Matches a packed weight with what it was made from."""

    weight: Bitsandbytes4bit
    job: PackJob  # how to read what it was made from, and to pack that again


class TensorPair(NamedTuple):
    """Matches a tensor of the source with that of its name; encoded ones are compared decoded."""

    original: TensorInfo
    tensor: TensorInfo
    are_stored_alike: bool = False  # equal bytes mean equal tensors


@dataclass(frozen=True)
class Pairs:
    """Lists what is to be compared with what.

    Attributes:
        weights: packed weights, with what they are packed from.
        copies: tensors that are not packed, with those of the source.
        alone: tensors in floats for which there is no source. They are only to be finite.
        alike: tensors of a checkpoint that does not say how it was made, with those of the source;
            weights that became FP8 without loss, with what they were.
    """

    weights: Sequence[PackedPair] = ()
    copies: Sequence[TensorPair] = ()
    alone: Sequence[TensorInfo] = ()
    alike: Sequence[TensorPair] = ()


@dataclass(frozen=True)
class _Origin:
    """Tells what a weight was packed from."""

    tensor: TensorInfo  # of the source
    matrix: PackedMatrix  # the part of it that became the weight


def pair(structure: Structure, source: Source) -> Pairs:
    """Finds the counterpart of every tensor of a 4-bit checkpoint; notes those without one."""
    by_name = {tensor.name: tensor for tensor in source.tensors}
    aliases = dict(_other_names(structure, source, by_name))
    for name, alias in aliases.items():
        by_name[name] = alias.tensor
    weights = tuple(_pair_weights(structure, source, by_name))
    copies = tuple(_pair_copies(structure, by_name))
    total = len(structure.weights) + len(structure.plain)
    if note_foreign(structure, source, len(weights) + len(copies), total):
        return Pairs()
    used = {*structure.weights, *structure.plain, *(found.job.source.name for found in weights)}
    for name in used & aliases.keys():
        used |= aliases[name].names
    for tensor in source.tensors:
        if tensor.name not in used:
            note_missing(structure, tensor, source)
    return Pairs(weights, copies)


def pair_decoded(structure: Structure, plan: DequantizationPlan) -> Pairs:
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
            copies.append(TensorPair(job.source, found))
    alike = tuple(_pair_in_fp8(plan, {pair.tensor.name: pair.tensor for pair in copies}))
    if note_foreign(structure, plan.source, in_shape, len(structure.tensors)):
        return Pairs()
    for name, tensor in structure.tensors.items():
        if name not in planned:
            structure.note("names", tensor.file, name, "is not in the source")
    return Pairs(copies=tuple(copies), alike=alike)


def _pair_in_fp8(
    plan: DequantizationPlan, stored: Mapping[str, TensorInfo]
) -> Iterator[TensorPair]:
    """Yields weights that were encoded anew, in FP8 and as they are in the source.

    That their values are equal proves them without the encoder.
    """
    for job in plan.output.jobs:
        encoded = job.source.encoding
        if not isinstance(encoded, Fp8Values) or job.name not in stored:
            continue
        scale = stored.get(encoded.scale.name)
        if scale is None:
            continue
        block = None if scale.elements == 1 else encoded.block
        weight = job.source._replace(dtype="F32")
        original = weight._replace(encoding=Fp4(encoded.values, encoded.scale))
        in_fp8 = weight._replace(encoding=Scaled(stored[job.name], scale, block))
        yield TensorPair(original, in_fp8)


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


class _Alias(NamedTuple):
    """Tells what a tensor of a 4-bit checkpoint is called in its source."""

    tensor: TensorInfo  # as it is compared
    names: frozenset[str]  # of the tensors of the source that it is read from


def _other_names(
    structure: Structure, source: Source, by_name: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, _Alias]]:
    """Yields tensors of the source under the names that other tools give them.

    Stacks of what the source has expert by expert, and what Unsloth renames in gpt-oss.
    """
    config = source.config or {}
    strange = [name for name in structure.weights if name not in by_name]
    if any(len(structure.weights[name].shape) == 3 for name in strange):
        for tensor in join_experts(source.tensors, config, layouts=layouts_of(config)):
            if isinstance(tensor.encoding, StackedExperts) and tensor.name in structure.weights:
                names = frozenset(part.name for _, part in tensor.encoding.parts)
                yield tensor.name, _Alias(tensor, names)
    if not is_gpt_oss(config):
        return
    for name in structure.plain:
        single = single_expert(name)
        if single is not None and single.is_of_unsloth:
            stack = by_name.get(f"{single.experts}.{single.projection}_bias")
            if stack is not None and len(stack.shape) == 2 and single.expert < stack.shape[0]:
                row = stack.rows(single.expert, single.expert + 1)
                bias = row._replace(name=name, shape=stack.shape[1:])
                yield name, _Alias(bias, frozenset({stack.name}))
        plain_name = name.replace(ROUTER_OF_UNSLOTH, ".router.")
        if plain_name != name and plain_name in by_name:
            router = by_name[plain_name]._replace(name=name)
            yield name, _Alias(router, frozenset({plain_name}))


def _origin_of_unsloth(
    weight: Bitsandbytes4bit, by_name: Mapping[str, TensorInfo]
) -> _Origin | None:
    """Returns what an expert of gpt-oss was packed from, by the name that Unsloth gives it."""
    single = single_expert(weight.values.name)
    if single is None or not single.is_of_unsloth or len(weight.shape) != 2:
        return None
    stack = by_name.get(f"{single.experts}.{single.projection}")
    if stack is None or single.expert >= stack.shape[0] or stack.shape[1:] != weight.shape[::-1]:
        return None
    rows, columns = weight.shape
    matrix = PackedMatrix(weight.values.name, (rows, columns), transpose=True, expert=single.expert)
    return _Origin(stack, matrix)


def _pair_weights(
    structure: Structure, source: Source, by_name: Mapping[str, TensorInfo]
) -> Iterator[PackedPair]:
    config = source.config or {}
    stacks = Experts.gather(source.tensors, config)
    experts: dict[str, _Origin] = {}
    for name in stacks.stacks:
        tensor = stacks.tensors[name]
        for matrix in stacks.matrices_of(tensor):
            experts[matrix.name] = _Origin(tensor, matrix)

    for weight in structure.weights.values():
        found = by_name.get(weight.values.name)
        if found is None:
            origin = experts.get(weight.values.name) or _origin_of_unsloth(weight, by_name)
            found = None if origin is None else origin.tensor
        else:
            origin = _origin_in(found, weight, config)
        if origin is None or math.prod(origin.matrix.shape) != weight.elements:
            text = "is not in the source"
            if found is not None:
                text = (
                    f"was packed from {list(weight.shape)}; "
                    f"the source has {found.dtype} {list(found.shape)}"
                )
            structure.note("names", weight.values.file, weight.values.name, text)
            continue
        size = footprint(weight.format, origin.matrix.shape)
        yield PackedPair(weight, PackJob(origin.tensor, origin.matrix, "stored in 4 bits", size))


def _origin_in(
    tensor: TensorInfo, weight: Bitsandbytes4bit, config: Mapping[str, Any]
) -> _Origin | None:
    """Returns how a weight was packed from the tensor of its name; None if it cannot have been."""
    shape = weight.shape
    if tensor.dtype not in FLOAT_TAGS:
        return None
    if len(shape) == 2 and is_transposed(module_of(weight.values.name), families_of(config)):
        rows, columns = shape
        if tensor.shape != (columns, rows):
            return None
        return _Origin(tensor, PackedMatrix(weight.values.name, (rows, columns), transpose=True))
    if tensor.shape != shape:
        return None
    if len(shape) == 2:
        rows, columns = shape
        return _Origin(tensor, PackedMatrix(weight.values.name, (rows, columns)))
    # blocks run over the flat order, whatever the shape
    matrix = PackedMatrix(weight.values.name, (1, tensor.elements))
    if tensor.encoding is None:
        tensor = tensor._replace(shape=matrix.shape)
    return _Origin(tensor, matrix)


def _pair_copies(structure: Structure, by_name: Mapping[str, TensorInfo]) -> Iterator[TensorPair]:
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
            yield TensorPair(found, tensor)


# --- two checkpoints, neither of which says how it was made from the other ---------------------


def pair_alike(structure: Structure, out: Source, source: Source) -> Pairs:
    """Matches all tensors by name, and notes those that cannot be compared."""
    originals = _as_comparable(source, out)
    tensors = _as_comparable(out, source)
    pairs = []
    for name, original in originals.items():
        tensor = tensors.get(name)
        if tensor is None:
            note_missing(structure, original, source)
        elif tensor.shape != original.shape:
            text = f"is {list(tensor.shape)}, but the source has {list(original.shape)}"
            structure.note("names", tensor.file, name, text)
        else:
            decoded = _decoded_for(original, tensor), _decoded_for(tensor, original)
            pairs.append(TensorPair(*decoded, _are_stored_alike(original, tensor)))
    for name, tensor in tensors.items():
        if name not in originals:
            structure.note("names", tensor.file, name, "is not in the source")
    if note_foreign(structure, source, len(pairs), len(tensors)):
        return Pairs()
    return Pairs(alike=tuple(pairs))


def _are_stored_alike(a: TensorInfo, b: TensorInfo) -> bool:
    """Returns True if equal bytes mean equal tensors."""
    if a.dtype != b.dtype:
        return False
    if a.encoding is None or b.encoding is None:
        return a.encoding is b.encoding
    return a.encoding.decodes_like(b.encoding) and _layout(a) == _layout(b)


def _decoded_for(tensor: TensorInfo, other: TensorInfo) -> TensorInfo:
    """Returns a tensor with the dtype that it is decoded to.

    A quantized weight is decoded to the dtype of the plain tensor that it is compared with. By way
    of its own dtype it would be rounded twice.
    """
    is_packed = tensor.is_quantized or isinstance(tensor.encoding, StackedExperts)
    # an expert's part of a stack of floats is as plain as the stack
    is_plain = other.encoding is None or isinstance(other.encoding, Strided)
    if is_packed and is_plain and other.dtype in DTYPE_NAMES:
        return tensor._replace(dtype=other.dtype)
    return tensor


def _layout(tensor: TensorInfo) -> list[tuple[str, str, list[int]]]:
    """Returns role, dtype and shape of each part that a tensor is decoded from."""
    if tensor.encoding is None:
        return []
    layout = []
    for role, part in tensor.encoding.parts:
        shape = [size for size in part.shape if size != 1]  # codes may be [n, 1] or [1, n]
        layout.append((role, part.dtype, shape))
    return layout


def _as_comparable(source: Source, other: Source) -> dict[str, TensorInfo]:
    """Returns tensors by name, as they can be compared with those of another checkpoint.

    Experts that are stacked in one tensor are taken apart where the other has them one by one, but
    for encoded stacks: of these, single experts are stacked too.
    """
    names = {tensor.name for tensor in other.tensors}
    tensors = _stacked_like(source, other)
    experts = Experts.gather(tensors, source.config or {})
    found = {}
    for tensor in tensors:
        matrices: Sequence[PackedMatrix] = ()
        if tensor.name in experts.stacks and tensor.encoding is None:
            matrices = experts.matrices_of(tensor)
        if any(matrix.name in names for matrix in matrices):
            for matrix in matrices:
                found[matrix.name] = _view_of(tensor, matrix)
        else:
            found[tensor.name] = tensor
    return found


def _stacked_like(source: Source, other: Source) -> Sequence[TensorInfo]:
    """Returns tensors with single experts stacked, if the other has stacks of which no view exists.

    Those are encoded stacks, and all that it has where the source has the names of Unsloth.
    """
    config = source.config or {}
    encoded = {tensor.name for tensor in other.tensors if tensor.encoding is not None}
    singles = [single_expert(tensor.name) for tensor in source.tensors]
    if any(single is not None and single.is_of_unsloth for single in singles):
        encoded |= {tensor.name for tensor in other.tensors}
    elif not any(singles) or not any(find_stack(name, layouts_of(config)) for name in encoded):
        return source.tensors
    try:
        joined = join_experts(source.tensors, config, layouts=layouts_of(config))
    except SourceError:  # an expert is missing, which the names of single ones show
        return source.tensors
    stacks = [tensor for tensor in joined if isinstance(tensor.encoding, StackedExperts)]
    return joined if any(stack.name in encoded for stack in stacks) else source.tensors


def _view_of(tensor: TensorInfo, matrix: PackedMatrix) -> TensorInfo:
    """Returns the weight of an expert as a view of the stack that holds it."""
    itemsize = DTYPE_BITS[tensor.dtype] // 8
    *_, rows, columns = tensor.shape
    outputs, inputs = matrix.shape
    first_row, _ = matrix.rows or (0, rows)
    first_column, _ = matrix.columns or (0, columns)
    if matrix.transpose:
        strides = (matrix.step, columns)
    else:
        strides = (matrix.step * columns, 1)
    # from the first value of the view to its last, with the gaps between them
    length = (outputs - 1) * strides[0] + (inputs - 1) * strides[1] + 1
    position = ((matrix.expert or 0) * rows + first_row) * columns + first_column
    start = tensor.start + position * itemsize
    stored = tensor._replace(shape=(length,), start=start, stop=start + length * itemsize)
    view = Strided(stored, strides=strides)
    return stored._replace(name=matrix.name, shape=matrix.shape, encoding=view)
