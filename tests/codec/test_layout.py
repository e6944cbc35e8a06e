"""Sizes on disk, known before any data is read."""

import json
import struct

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nf4conv.codec.ops import quantize_4bit
from nf4conv.format.layout import Format, components, quant_state_json


@given(pattern=st.integers(0, 2**32 - 1))
@example(pattern=0x80000001)
@example(pattern=0xFF7FFFFF)
@example(pattern=0x7FC00000)
@example(pattern=0x80800000)
def test_no_offset_makes_the_json_longer_than_planned(pattern):
    offset = struct.unpack("<f", struct.pack("<I", pattern))[0]
    format = Format("nf4", 64, True, "bfloat16")
    planned = components(format, (8, 64))[-1].shape[0]
    assert len(quant_state_json(format, (8, 64), offset)) <= planned


def planned_and_made(
    shape: tuple[int, ...], quant_type: str, blocksize: int, double_quant: bool
) -> None:
    packed, state = quantize_4bit(torch.randn(shape), quant_type, blocksize, double_quant)
    made = {"": packed, **state.components()}
    planned = components(Format(quant_type, blocksize, double_quant, "float32"), shape)
    tags = {torch.uint8: "U8", torch.float32: "F32"}
    assert [part.suffix for part in planned] == list(made)
    for part in planned[:-1]:
        assert (part.dtype, part.shape) == (
            tags[made[part.suffix].dtype],
            tuple(made[part.suffix].shape),
        )
        assert part.nbytes == made[part.suffix].nbytes
    blob = made[planned[-1].suffix]
    assert json.loads(bytes(blob.tolist()))["shape"] == list(shape)
    assert (
        blob.numel() <= planned[-1].nbytes if double_quant else blob.numel() == planned[-1].nbytes
    )


def test_planned_components_are_those_that_quantizing_makes():
    planned_and_made((192, 128), "nf4", 64, True)
    planned_and_made((3, 5, 7), "fp4", 32, True)
    planned_and_made((1,), "nf4", 4096, False)
    planned_and_made((257, 64), "nf4", 64, False)
