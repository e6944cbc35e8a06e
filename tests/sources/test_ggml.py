"""Blocks of GGUF decode to the values of the package `gguf`, bit for bit (`make test-gguf`)."""

import numpy as np
import pytest
import torch
from gguf_files import blocks_of

from nf4conv.codec.decode.ggml.decoding import DECODERS, decode_ggml
from nf4conv.errors import CodecError
from nf4conv.format.gguf import BLOCK_TYPES, BY_NAME

gguf = pytest.importorskip("gguf", reason="make test-gguf installs gguf")


def random_blocks(block_type: str, count: int) -> np.ndarray:
    """Bytes of any value, in which no scale is NaN or infinite."""
    size = BY_NAME[block_type].size
    random = np.random.default_rng(size).integers(0, 256, (count, size), dtype=np.uint8)
    halves = random.view(np.uint16) if size % 2 == 0 else None
    if halves is not None:  # wherever a half-precision number may be: none with all exponent bits
        halves[(halves & 0x7C00) == 0x7C00] &= 0xBFFF
    return random


@pytest.mark.parametrize("block_type", DECODERS)
def test_every_type_decodes_like_gguf(block_type: str):
    blocks = random_blocks(block_type, 512)
    kind = gguf.GGMLQuantizationType[block_type]
    assert BLOCK_TYPES[kind] == (block_type, *gguf.GGML_QUANT_SIZES[kind])
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks.reshape(64, -1), kind)
    found = decode_ggml(torch.from_numpy(blocks.reshape(64, -1)), block_type, torch.float32)
    assert found.shape == expected.shape
    assert np.unique(expected).size > 100
    np.testing.assert_array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("block_type", DECODERS)
def test_odd_scales_decode_like_gguf(block_type: str):
    """Subnormal scales, infinite ones, NaN, minus 0."""
    raw = blocks_of(block_type, 8, 40)
    kind = gguf.GGMLQuantizationType[block_type]
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.numpy(), kind)
    found = decode_ggml(raw, block_type, torch.float32).numpy()
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), ~is_number)
    np.testing.assert_array_equal(
        found[is_number].view(np.uint32), expected[is_number].view(np.uint32)
    )


def test_all_that_gguf_decodes_is_decoded():
    of_gguf = {kind.name for kind in gguf.quants._type_traits} - {"F16", "F32", "BF16"}
    assert of_gguf <= DECODERS.keys()


def test_long_tensors_are_decoded_in_steps(monkeypatch: pytest.MonkeyPatch):
    blocks = torch.from_numpy(random_blocks("Q4_K", 100).reshape(10, -1))
    whole = decode_ggml(blocks, "Q4_K", torch.float32)
    monkeypatch.setattr("nf4conv.codec.decode.ggml.decoding._VALUES_TOGETHER", 256 * 7)
    assert torch.equal(whole, decode_ggml(blocks, "Q4_K", torch.float32))


def test_what_is_not_decoded_is_refused():
    with pytest.raises(CodecError, match="type Q1_0 is not decoded"):
        decode_ggml(torch.zeros(1, 18, dtype=torch.uint8), "Q1_0", torch.float32)
    with pytest.raises(CodecError, match="19 bytes are no whole number of blocks of Q4_0"):
        decode_ggml(torch.zeros(1, 19, dtype=torch.uint8), "Q4_0", torch.float32)
