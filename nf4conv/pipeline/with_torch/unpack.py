"""Packed weights as pipeline tasks: read the codes and scales of a piece, decode them, write the values to their place.

A weight decodes in pieces that begin at a multiple of 256 blocks, where both its codes and its scales can be cut; they
are as large as a worker's buffer when decoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nf4conv.checkpoint.encoded_pieces import packed_part, packed_spans
from nf4conv.checkpoint.header import DTYPE_BITS, TensorInfo
from nf4conv.checkpoint.plan import CopyJob
from nf4conv.codec.ops import backend
from nf4conv.codec.quant_state import QuantState, decoding_of
from nf4conv.format.encodings import Method
from nf4conv.pipeline.loop import Activity
from nf4conv.pipeline.shards import ShardTask
from nf4conv.pipeline.with_torch.reading import TORCH_DTYPES, check_cast
from nf4conv.pipeline.with_torch.worker import TorchWorker


@dataclass(frozen=True)
class UnpackPiece(ShardTask[TorchWorker]):
    """Elements start … stop of a packed weight that is stored decoded."""

    job: CopyJob
    start: int
    stop: int

    def run(self, worker: TorchWorker) -> None:
        packed, state = read_packed(worker, packed_part(self.job.source, self.start, self.stop))
        with worker.timed(Activity.COMPUTE):
            values = decode_piece(packed, state, self.stop - self.start, TORCH_DTYPES[self.job.dtype])
            if values.dtype != state.dtype:
                check_cast(values, self.job, lambda: decode_piece(packed, state, values.numel(), torch.float32))
        offset = self.job.offset + self.start * DTYPE_BITS[self.job.dtype] // 8
        worker.write([(self.progress.writer, offset, values)])
        self.progress.done()


def packed_spans_of(job: CopyJob, piece: int) -> list[tuple[int, int]]:
    """A packed weight in pieces of so many decoded bytes; none for a tensor that is encoded in another way."""
    encoding = job.source.encoding
    if encoding is None or encoding.method is not Method.BITSANDBYTES_4BIT or job.dtype != job.source.dtype:
        return []
    return packed_spans(job.elements, encoding.block[0], piece // (DTYPE_BITS[job.dtype] // 8))


def read_packed(worker: TorchWorker, piece: TensorInfo) -> tuple[torch.Tensor, QuantState]:
    """The codes and the state of a weight that bitsandbytes packed, or of a piece of it (`packed_part`)."""
    assert piece.encoding is not None
    raws = worker.read([part.file_range for _, part in piece.encoding.parts])
    with worker.timed(Activity.COMPUTE):
        return packed_piece(dict(piece.encoding.parts), raws)


def decode_piece(packed: torch.Tensor, state: QuantState, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[elements]: the values of a piece, from `packed_piece`, in float32, float16 or bfloat16."""
    values = torch.empty(elements, dtype=dtype, device=packed.device)
    backend(packed.device).dequantize_blocks(packed, decoding_of(state), values)
    return values


def packed_piece(parts: Mapping[str, TensorInfo], raws: Sequence[torch.Tensor]) -> tuple[torch.Tensor, QuantState]:
    """The codes of a piece and its state, whose shape is that of the whole weight, from `cut_parts` and their bytes."""
    tensors = {role: raw.view(TORCH_DTYPES[part.dtype]) for (role, part), raw in zip(parts.items(), raws, strict=True)}
    packed = tensors.pop("values")
    return packed, QuantState.from_components(tensors)
