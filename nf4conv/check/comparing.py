"""Matches the tensors of any two checkpoints, and says how they can be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.experts.gathering import Experts
from nf4conv.choose.wishes import is_wanted
from nf4conv.errors import SourceError
from nf4conv.format.layout import DTYPE_NAMES
from nf4conv.models.expert_layouts import find_stack, layouts_of
from nf4conv.models.single_experts import single_expert
from nf4conv.options import CompareOptions
from nf4conv.plan.joining import join_experts
from nf4conv.sources.encodings.types.arranged import StackedExperts, Strided
from nf4conv.sources.encodings.types.kinds import is_quantized
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import DTYPE_BITS, TensorInfo


@dataclass(frozen=True)
class TensorPair:
    """The tensors of one name in two checkpoints. At least one of them has it.

    Attributes:
        a: the tensor in the first checkpoint. None if it lacks the tensor.
        b: the tensor in the second checkpoint. None if it lacks the tensor.
    """

    a: TensorInfo | None
    b: TensorInfo | None

    @property
    def either(self) -> TensorInfo:
        """The tensor in the first checkpoint that has it."""
        found = self.a or self.b
        assert found is not None
        return found


@dataclass(frozen=True)
class ComparablePair:
    """Two tensors of one name and one shape, which can be compared.

    Attributes:
        a: the tensor in the first checkpoint.
        b: the tensor in the second checkpoint.
    """

    a: TensorInfo
    b: TensorInfo

    def as_decoded(self) -> tuple[TensorInfo, TensorInfo]:
        """Returns both tensors with the dtypes that they are decoded to for the comparison."""
        return _decoded_for(self.a, self.b), _decoded_for(self.b, self.a)

    def are_stored_alike(self) -> bool:
        """Tells whether equal bytes mean equal tensors."""
        if self.a.dtype != self.b.dtype:
            return False
        if self.a.encoding is None or self.b.encoding is None:
            return self.a.encoding is self.b.encoding
        if not self.a.encoding.decodes_like(self.b.encoding):
            return False
        return _layout(self.a) == _layout(self.b)


def _decoded_for(tensor: TensorInfo, other: TensorInfo) -> TensorInfo:
    """Returns a tensor with the dtype that it is decoded to.

    A quantized weight is decoded to the dtype of the plain tensor that it is compared with. By way
    of its own dtype it would be rounded twice.
    """
    is_packed = is_quantized(tensor) or isinstance(tensor.encoding, StackedExperts)
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


def pair_tensors(
    a: Source | None, b: Source | None, options: CompareOptions
) -> dict[str, TensorPair]:
    """Matches the tensors of two checkpoints by name.

    Args:
        a: the first checkpoint. None if it lacks this submodel of a pipeline.
        b: the second checkpoint. None if it lacks this submodel of a pipeline.
        options: which tensors to look at.

    Returns:
        The pair of each name, those of the first checkpoint before those that only the second has.
    """
    wanted_a = _wanted(_alike(a, b), options)
    wanted_b = _wanted(_alike(b, a), options)
    pairs = {}
    for name in [*wanted_a, *wanted_b]:
        pairs[name] = TensorPair(wanted_a.get(name), wanted_b.get(name))
    return pairs


def _alike(source: Source | None, other: Source | None) -> dict[str, TensorInfo]:
    """Returns tensors by name, as they can be compared with those of another checkpoint.

    Experts that are stacked in one tensor are taken apart where the other has them one by one, but
    for encoded stacks: of these, single experts are stacked too.

    Args:
        source: one checkpoint; None if it lacks this submodel of a pipeline.
        other: the other.
    """
    if source is None:
        return {}
    names = set()
    if other is not None:
        names = {tensor.name for tensor in other.tensors}
    tensors = source.tensors if other is None else _stacked_like(source, other)
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


def _wanted(tensors: Mapping[str, TensorInfo], options: CompareOptions) -> dict[str, TensorInfo]:
    return {
        name: tensor
        for name, tensor in tensors.items()
        if is_wanted(name, options.include, options.exclude)
    }


def comparable(pairs: Mapping[str, TensorPair]) -> dict[str, ComparablePair]:
    """Returns the tensors that both checkpoints have in one shape, by name."""
    found = {}
    for name, pair in pairs.items():
        if pair.a is not None and pair.b is not None and pair.a.shape == pair.b.shape:
            found[name] = ComparablePair(pair.a, pair.b)
    return found
