"""Matches the tensors of two checkpoints of one model, neither of which says how it was made from
the other.
"""

from collections.abc import Sequence

from nf4conv.check.pairing import Pairs, TensorPair, note_foreign, note_missing
from nf4conv.check.structure import Structure
from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.experts import Experts
from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_BITS, DTYPE_NAMES
from nf4conv.models.experts import find_stack, single_expert
from nf4conv.models.families import layouts_of
from nf4conv.plan.joining import join_experts
from nf4conv.sources.arranged import StackedExperts, Strided
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo


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
