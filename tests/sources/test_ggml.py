"""Blocks of GGUF decode to the values of the package `gguf`, bit for bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from command_line import run
from gguf_files import blocks_of, write_gguf

from nf4conv.codec.decode import floats
from nf4conv.codec.decode.ggml import decode_ggml
from nf4conv.format.gguf import BLOCK_TYPES, BY_NAME, LAYOUTS, PLAIN
from nf4conv.sources.gguf import opening


def test_the_table_of_types_is_that_of_gguf():
    for number, block_type in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (number, kind.name, *gguf.GGML_QUANT_SIZES[kind]) == block_type
    assert {kind.name for kind in gguf.quants._type_traits} <= BY_NAME.keys()
    assert {*LAYOUTS, *PLAIN} < BY_NAME.keys()


def test_every_type_decodes_like_gguf():
    """Bytes of any value; scales that are subnormal, infinite, NaN, minus 0."""
    for block_type in BY_NAME.keys() - set(PLAIN):
        raw = blocks_of(block_type, 64, 40)
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[block_type])
        found = decode_ggml(raw, block_type, torch.float32).numpy()
        assert np.unique(expected).size > 100
        is_number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), ~is_number)
        np.testing.assert_array_equal(
            found[is_number].view(np.uint32), expected[is_number].view(np.uint32)
        )


@pytest.mark.parametrize("block_type", ["Q4_K", "IQ4_XS"])
def test_long_tensors_are_decoded_in_steps(monkeypatch: pytest.MonkeyPatch, block_type: str):
    blocks = blocks_of(block_type, 10, 10)[1:]
    whole = decode_ggml(blocks, block_type, torch.bfloat16)
    monkeypatch.setattr(floats, "_CPU_CHUNK", 256 * 7)
    again = decode_ggml(blocks, block_type, torch.bfloat16)
    assert torch.equal(whole.view(torch.int16), again.view(torch.int16))


def test_rare_types_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(opening, "find_spec", lambda _: None)
    types = {"blk.0.attn_q.weight": "IQ4_XS"}
    assert run("inspect", write_gguf(tmp_path / "q4_k.gguf", default="Q4_K")).exit_code == 0
    said = run("inspect", write_gguf(tmp_path / "iq4.gguf", types=types))
    assert said.exit_code == 2
    assert "iq4.gguf: blk.0.attn_q.weight: is in IQ4_XS, which llama.cpp's own" in said.stderr
    assert "pip install 'nf4conv[gguf]'" in said.stderr
