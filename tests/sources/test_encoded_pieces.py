"""Encoded tensors taken apart: the pieces, decoded one by one, are the whole."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.format.integers import IntegerLayout
from nf4conv.run.device.on_torch.device import TorchBackend
from nf4conv.run.device.on_torch.reading import TORCH_DTYPES, read_decoded
from nf4conv.run.worker import Worker
from nf4conv.sources.cutting import pieces_of
from nf4conv.sources.foreign.bitsandbytes import read_weight
from nf4conv.sources.foreign.floats import Fp4, Scaled
from nf4conv.sources.foreign.integers import Awq, CompressedIntegers, Gptq, PackedIntegers
from nf4conv.sources.reader import Reader, read_bytes
from nf4conv.sources.tensors import TensorInfo

F8, F32, U8, I8, I32 = "F8_E4M3", "F32", "U8", "I8", "I32"


def integers(kind: type[PackedIntegers], bits: int, **more: Any) -> Callable[..., PackedIntegers]:
    codes = IntegerLayout(PACKINGS[kind], bits, columns=64, group_size=16, **more)
    return partial(kind, zeros=None, group_index=None, codes=codes)


PACKINGS = {CompressedIntegers: "compressed-tensors", Gptq: "GPTQ", Awq: "AWQ"}
CASES = {
    "one scale for all": (Scaled, (300, 64), {"values": (F8, (300, 64)), "scale": (F32, ())}),
    "a scale for each row": (
        Scaled,
        (300, 64),
        {"values": (F8, (300, 64)), "scale": (F32, (300,))},
    ),
    "a column of scales": (
        Scaled,
        (300, 64),
        {"values": (F8, (300, 64)), "scale": (F32, (300, 1))},
    ),
    "a scale for each column": (
        Scaled,
        (300, 64),
        {"values": (F8, (300, 64)), "scale": (F32, (1, 64))},
    ),
    "blocks, the last ones partial": (
        partial(Scaled, block=(32, 64)),
        (300, 72),
        {"values": (F8, (300, 72)), "scale": (F32, (10, 2))},
    ),
    "rows of one block": (
        partial(Scaled, block=(32, 64)),
        (20, 640),
        {"values": (F8, (20, 640)), "scale": (F32, (1, 10))},
    ),
    "a stack in blocks": (
        partial(Scaled, block=(32, 32)),
        (3, 100, 64),
        {"values": (F8, (3, 100, 64)), "scale": (F32, (3, 4, 2))},
    ),
    "a stack with a scale for each column": (
        Scaled,
        (3, 100, 64),
        {"values": (F8, (3, 100, 64)), "scale": (F32, (3, 1, 64))},
    ),
    "a stack with one scale": (
        Scaled,
        (3, 100, 64),
        {"values": (F8, (3, 100, 64)), "scale": (F32, ())},
    ),
    "8-bit rows": (
        partial(Scaled, by_127=True),
        (300, 64),
        {"values": (I8, (300, 64)), "scale": (F32, (300,))},
    ),
    "FP4 with a divisor": (
        Fp4,
        (300, 64),
        {"values": (U8, (300, 32)), "scale": (F8, (300, 4)), "divisor": (F32, (1,))},
    ),
    "words of rows": (
        integers(CompressedIntegers, 4),
        (300, 64),
        {"values": (I32, (300, 8)), "scale": (F32, (300, 4))},
    ),
    "words of rows with zero points": (
        integers(CompressedIntegers, 8),
        (300, 64),
        {"values": (I32, (300, 16)), "scale": (F32, (300, 4)), "zeros": (I32, (75, 4))},
    ),
    "words of rows with zero points in bytes": (
        integers(CompressedIntegers, 4),
        (300, 64),
        {"values": (I32, (300, 8)), "scale": (F32, (300, 4)), "zeros": (I8, (300, 4))},
    ),
    "GPTQ": (
        integers(Gptq, 4, zeros_less_one=True),
        (300, 64),
        {"values": (I32, (8, 300)), "scale": (F32, (4, 300)), "zeros": (I32, (4, 38))},
    ),
    "GPTQ in 3 bits": (
        integers(Gptq, 3),
        (320, 64),
        {"values": (I32, (6, 320)), "scale": (F32, (4, 320)), "zeros": (I32, (4, 30))},
    ),
    "AWQ": (
        integers(Awq, 4),
        (296, 64),
        {"values": (I32, (64, 37)), "scale": (F32, (4, 296)), "zeros": (I32, (4, 37))},
    ),
    "experts of gpt-oss": (
        partial(Fp4, is_transposed=True),
        (3, 64, 90),
        {"values": (U8, (3, 90, 32)), "scale": (U8, (3, 90, 2))},
    ),
    "a vector": (Scaled, (300,), {"values": (F8, (300,)), "scale": (F32, ())}),
}


def write_encoded(folder: Path, case: str) -> TensorInfo:
    """A tensor whose parts lie one after the other in a file."""
    encoding, shape, layout = CASES[case]
    file, content, parts = folder / "parts", bytearray(), {}
    generator = torch.Generator().manual_seed(0)
    for role, (dtype, part_shape) in layout.items():
        tensor = torch.rand(part_shape, generator=generator) + 1
        if dtype == I32:
            tensor = torch.randint(-(2**31), 2**31, part_shape, generator=generator).to(torch.int32)
        elif dtype != F32:
            tensor = torch.randint(0, 120, part_shape, dtype=torch.uint8, generator=generator)
        raw = tensor.numpy().tobytes()
        assert len(raw) == math.prod(part_shape) * DTYPE_BITS[dtype] // 8
        start = len(content)
        content += raw
        parts[role] = TensorInfo(role, dtype, part_shape, file, start, len(content))
    file.write_bytes(content)
    return TensorInfo("w", "BF16", shape, file, 0, len(content), encoding(**parts))


@pytest.mark.parametrize("case", CASES)
def test_pieces_decode_to_the_whole(tmp_path: Path, case: str):
    tensor = write_encoded(tmp_path, case)
    for most, unit in product([1, 5000, 10**6], [1, 32, 512]):
        pieces = [*pieces_of(tensor, most, unit)]
        starts = [piece.start for piece in pieces] + [tensor.elements]
        assert starts[0] == 0
        assert all(start % unit == 0 for start in starts[:-1])
        assert [right - left for left, right in pairwise(starts)] == [
            piece.tensor.elements for piece in pieces
        ]
        with Reader() as reader:
            worker = Worker(reader, 2**16, lambda _: None)
            with TorchBackend("cpu").open(worker) as device:
                whole = read_decoded(device, tensor)
                again = torch.cat([read_decoded(device, piece.tensor).view(-1) for piece in pieces])
        assert whole.shape == tensor.shape
        assert whole.dtype == TORCH_DTYPES[tensor.dtype]
        assert torch.equal(whole.view(-1).view(torch.int16), again.view(torch.int16))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in ("rows of one block", "a vector")]
)
def test_what_can_be_cut_is_cut(tmp_path: Path, case: str):
    tensor = write_encoded(tmp_path, case)
    assert len([*pieces_of(tensor, 2000)]) > 1


@pytest.mark.parametrize("elements", [1, 4095, 32768, 100_001])
def test_packed_weights_in_pieces(tmp_path: Path, elements: int):
    for (blocksize, unit), double_quant in product([(32, 1), (64, 128), (64, 4096)], [True, False]):
        weight = torch.randn(1, elements, generator=torch.Generator().manual_seed(0)).bfloat16()
        packed, state = quantize_4bit(weight, blocksize=blocksize, double_quant=double_quant)
        file, content, parts = tmp_path / "parts", bytearray(), {}
        for role, part in {"values": packed, **state.components()}.items():
            raw = part.numpy().tobytes()
            dtype = {torch.uint8: U8, torch.float32: F32}[part.dtype]
            start = len(content)
            content += raw
            parts[role] = TensorInfo(role, dtype, tuple(part.shape), file, start, len(content))
        file.write_bytes(content)
        encoding, faults = read_weight(parts.pop("values"), parts, read_bytes)
        assert not faults
        tensor = TensorInfo("w", "BF16", (1, elements), file, 0, len(content), encoding)
        pieces = list(pieces_of(tensor, 20_000, unit))
        assert len(pieces) > 1 or elements <= 32768
        assert all(
            piece.start % unit == 0 and piece.start % (256 * blocksize) == 0 for piece in pieces
        )
        with Reader() as reader:
            worker = Worker(reader, 2**16, lambda _: None)
            with TorchBackend("cpu").open(worker) as device:
                again = torch.cat([read_decoded(device, piece.tensor).clone() for piece in pieces])
        expected = dequantize_4bit(packed, state)
        assert torch.equal(again.view(torch.int16), expected.view(-1).view(torch.int16))
