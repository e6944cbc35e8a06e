"""Tensors from a source: encoded ones decoded on the device, and weights as they are before they
are packed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Final

import torch

from nf4conv.codec.decode.ggml import decode_ggml, undo_change
from nf4conv.errors import CodecError
from nf4conv.format.dtypes import DTYPE_BITS, TORCH_NAMES
from nf4conv.format.gguf import NEGATIVE_EXP, PLAIN, PLUS_ONE
from nf4conv.plan.jobs import PackJob
from nf4conv.run.device.on_torch.buffers import TorchBuffers
from nf4conv.run.device.on_torch.merge import Factors, merge_deltas
from nf4conv.run.pieces import located
from nf4conv.run.worker import Activity
from nf4conv.sources.arranged import (
    Columns,
    Excerpt,
    LowRankDelta,
    Merged,
    StackedExperts,
    Strided,
)
from nf4conv.sources.foreign.formats import Foreign
from nf4conv.sources.gguf.blocks import GgufBlocks
from nf4conv.sources.tensors import Encoding, FileRange, Parts, TensorInfo

TORCH_DTYPES: Final = {tag: getattr(torch, name) for tag, name in TORCH_NAMES.items()}
"""By safetensors' tag: what is computed with, compared, and what encoded tensors consist of."""


def read_values(device: TorchBuffers, tensor: TensorInfo) -> torch.Tensor:
    """Reads the values of a tensor to the device: [elements], decoded if they are encoded."""
    if tensor.encoding is not None:
        return read_decoded(device, tensor).view(-1)
    [raw] = device.read([tensor.file_range])
    return raw.view(TORCH_DTYPES[tensor.dtype])


def read_decoded(device: TorchBuffers, tensor: TensorInfo) -> torch.Tensor:
    """Reads and decodes an encoded tensor, or a piece of one (sources/cutting.py).

    It is contiguous. Raises a CodecError if its parts contradict each other.
    """
    encoding = tensor.encoding
    assert encoding is not None
    if isinstance(encoding, Merged):
        return _read_merged(device, tensor, encoding)
    if isinstance(encoding, StackedExperts):
        return _read_stack(device, tensor, encoding)
    if isinstance(encoding, Excerpt):
        base = _read_whole(device, encoding.base._replace(dtype=tensor.dtype))
        run = base.view(-1)[encoding.first : encoding.first + tensor.elements]
        return run.view(tensor.shape)
    raws = _read_parts(device, encoding.parts)
    with device.timed(Activity.COMPUTE):
        views = {}
        for (role, part), raw in zip(encoding.parts, raws, strict=True):
            views[role] = _shaped(raw.view(TORCH_DTYPES[part.dtype]), part)
        try:
            decoded = _decode(tensor, encoding, views)
        except CodecError as error:
            raise CodecError.about(tensor.file, tensor.name, f"{error}") from error
        if decoded.numel() != tensor.elements:
            decoded = decoded.view(-1)[: tensor.elements]  # the last code of a weight is padding
        return _shaped(decoded, tensor)


def _read_parts(device: TorchBuffers, parts: Parts) -> list[torch.Tensor]:
    """Reads the bytes of parts.

    What columns are cut out of is kept for the next piece. If there is no room for it, they are
    read line by line.
    """
    matrices = []
    for _, part in parts:
        if isinstance(part.encoding, Columns):
            matrices.append(part.encoding.values)
    kept = device.keep(tuple(matrix.file_range for matrix in matrices)) if matrices else None
    ranges: list[FileRange] = []
    for _, part in parts:
        if kept is None or not isinstance(part.encoding, Columns):
            ranges.extend(part.file_ranges)
    raws = iter(device.read(ranges))
    whole = iter(kept or ())
    found = []
    for _, part in parts:
        if not isinstance(part.encoding, Columns):
            found.append(next(raws))
        elif kept is None:
            found.append(torch.stack([next(raws) for _ in range(part.shape[0])]))
        else:
            found.append(_cut_columns(next(whole), part.encoding))
    return found


def _cut_columns(raw: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Returns the bytes of some columns, given those of the whole matrix."""
    size = DTYPE_BITS[columns.values.dtype] // 8
    lines = raw.view(columns.values.shape[0], -1)
    return lines[:, columns.first * size : columns.last * size].contiguous()


def _decode(
    tensor: TensorInfo,
    encoding: Encoding,
    parts: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Decodes a tensor from its parts, by role; the result is contiguous, in the tensor's dtype."""
    dtype = TORCH_DTYPES[tensor.dtype]
    if isinstance(encoding, Strided):
        view = torch.as_strided(parts["values"], tensor.shape, encoding.strides)
        return view.to(dtype).contiguous()
    if isinstance(encoding, GgufBlocks):
        return _decode_gguf(encoding, parts["values"], dtype)
    if not isinstance(encoding, Foreign):
        raise AssertionError(f"{tensor.name}: {encoding.name} has no decoder here")
    arguments = encoding.arguments
    decoded: torch.Tensor = _decoder(encoding.decoder)(**parts, **arguments, dtype=dtype)
    if encoding.is_transposed and "is_transposed" not in arguments:
        return decoded.t().contiguous()
    return decoded


@cache
def _decoder(name: str) -> Callable[..., torch.Tensor]:
    """Returns a function by "module:name"."""
    found: Callable[..., torch.Tensor] = resolve_name(name)
    return found


def _decode_gguf(encoding: GgufBlocks, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if encoding.block_type not in PLAIN:
        # arithmetic is done before the values are rounded
        wanted = torch.float32 if encoding.changed in (PLUS_ONE, NEGATIVE_EXP) else dtype
        values = decode_ggml(values, encoding.block_type, wanted)
    if encoding.changed is not None:
        values = undo_change(values, encoding.changed, encoding.heads, encoding.shared)
    return values.to(dtype).contiguous()


def _shaped(values: torch.Tensor, tensor: TensorInfo) -> torch.Tensor:
    """Returns values in the shape of a tensor."""
    if values.shape == tensor.shape:
        return values  # a view that changes nothing costs as much as a small kernel
    return values.view(tensor.shape)


def _read_stack(device: TorchBuffers, tensor: TensorInfo, encoding: StackedExperts) -> torch.Tensor:
    """Reads matrices of experts one by one, each of them to its place in the stack."""
    dtype = TORCH_DTYPES[tensor.dtype]
    stack: torch.Tensor | None = None
    for number, projections in enumerate(encoding.experts):
        matrices = []
        for part in projections:
            if part.encoding is not None:
                part = part._replace(dtype=tensor.dtype)
            # cast or copied, since the next one is read into the same buffer
            matrices.append(_read_whole(device, part).to(dtype, copy=True))
        with device.timed(Activity.COMPUTE):
            matrix = _fused(matrices, encoding)
            if stack is None:
                shape = (len(encoding.experts), *matrix.shape)
                stack = torch.empty(shape, dtype=dtype, device=matrix.device)
            stack[number] = matrix
    assert stack is not None
    return _shaped(stack, tensor)


def _fused(matrices: Sequence[torch.Tensor], encoding: StackedExperts) -> torch.Tensor:
    """Fuses the projections of one expert, as they lie in the stack."""
    if len(matrices) == 1:
        [matrix] = matrices
    elif encoding.is_interleaved:
        matrix = torch.stack(list(matrices), dim=1).flatten(0, 1)
    else:
        matrix = torch.cat(list(matrices))
    return matrix.t() if encoding.is_transposed and matrix.dim() == 2 else matrix


def _read_merged(device: TorchBuffers, tensor: TensorInfo, encoding: Merged) -> torch.Tensor:
    factors = [_read_factors(device, delta) for delta in encoding.deltas]
    values = _read_whole(device, encoding.base)
    with device.timed(Activity.COMPUTE):
        return merge_deltas(values, factors, encoding.first_row, TORCH_DTYPES[tensor.dtype])


def _read_factors(device: TorchBuffers, delta: LowRankDelta) -> Factors:
    """Reads the tensors of a delta; the device keeps them for other pieces of the same tensor."""
    up = device.kept(delta.up, _read_whole)
    down = device.kept(delta.down, _read_whole)
    magnitude = None
    if delta.magnitude is not None:
        magnitude = device.kept(delta.magnitude, _read_whole)
    return Factors(delta, up, down, magnitude)


def _read_whole(device: TorchBuffers, tensor: TensorInfo) -> torch.Tensor:
    return _shaped(read_values(device, tensor), tensor)


def exactly_decoded(tensor: TensorInfo) -> TensorInfo:
    """Returns an encoded tensor with a dtype that holds all values that it decodes to."""
    assert tensor.encoding is not None
    if isinstance(tensor.encoding, Strided):
        return tensor
    return tensor._replace(dtype="F32")


def read_matrix(device: TorchBuffers, job: PackJob, dtype: torch.dtype) -> torch.Tensor:
    """Reads a whole weight that is stored transposed, encoded, or as a part of a larger tensor.

    It is flat and contiguous, as it is packed.
    """
    source, matrix = located(job)
    if source.encoding is not None:
        weight = read_decoded(device, source)
        if matrix.expert is not None:
            weight = weight[matrix.expert]
        if matrix.rows is not None:
            weight = weight[slice(*matrix.rows)]
    else:
        [raw] = device.read([(source.file, *job.source_range)])
        weight = raw.view(TORCH_DTYPES[source.dtype]).view(-1, source.shape[-1])
    with device.timed(Activity.COMPUTE):
        if matrix.columns is not None:
            weight = weight[:, slice(*matrix.columns)]
        if matrix.transpose:
            weight = weight.t()
        weight = weight[:: matrix.step]
        return weight.to(dtype).contiguous().view(-1)
