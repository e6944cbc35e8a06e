"""Packed integers of compressed-tensors, GPTQ and AWQ: decoded values against the methods' own."""

from itertools import product
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from integers import Weight, awq, compressed, gptq, pack_stream
from weights import same_bits

from nf4conv.codec.decode.integers import decode_integers, unpack
from nf4conv.errors import CodecError
from nf4conv.format.integers import IntegerLayout

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def decode(weight: Weight, packing: str, bits: int, group_size: int, **more: Any) -> torch.Tensor:
    parts = weight.parts
    columns = weight.decoded.shape[1]
    layout = IntegerLayout(packing, bits, columns, group_size, **more)
    names = ("qweight", "scales", "qzeros", "g_idx")
    if packing == "compressed-tensors":
        names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    values, scale, zeros, index = (parts.get(name) for name in names)
    assert values is not None
    assert scale is not None
    dtype = weight.decoded.dtype
    return decode_integers(values, scale, layout, dtype, zeros=zeros, group_index=index)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_is_that_of_gptqmodel(bits: int):
    for version, is_symmetric, is_reordered in product([1, 2], [True, False], [True, False]):
        weight = gptq(
            96,
            128,
            bits=bits,
            version=version,
            is_symmetric=is_symmetric,
            is_reordered=is_reordered,
        )
        same_bits(decode(weight, "GPTQ", bits, 32, zeros_less_one=version == 1), weight.decoded)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("columns", "group_size"), [(128, 32), (192, 192)], ids=str)
def test_awq_is_that_of_autoawq(dtype: torch.dtype, columns: int, group_size: int):
    weight = awq(96, columns, group_size=group_size, dtype=dtype)
    same_bits(decode(weight, "AWQ", 4, group_size), weight.decoded)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_awq_is_that_of_the_converter_of_compressed_tensors(dtype: torch.dtype):
    """It unpacks AWQ by code of its own, and packs it anew."""
    weight = awq(64, 128, group_size=64, dtype=dtype)
    tensors = {f"m.{name}": part.clone() for name, part in weight.parts.items()}
    converted = AutoAWQConverter(group_size=64).process(tensors)
    state = {name.removeprefix("m."): part for name, part in converted.items()}
    arguments = {"num_bits": 4, "type": "int", "symmetric": False, "group_size": 64}
    weights = QuantizationArgs(strategy="group", **arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    expected = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    same_bits(decode(weight, "AWQ", 4, 64), expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_quantized_is_that_of_compressed_tensors(bits: int):
    for group_size, zeros, dtype in product(
        [32, None], ["none", "packed", "bytes"], [F16, BF16, F32]
    ):
        weight = compressed(
            72,
            128,
            bits=bits,
            group_size=group_size,
            is_symmetric=zeros == "none",
            has_packed_zeros=zeros == "packed",
            dtype=dtype,
        )
        same_bits(decode(weight, "compressed-tensors", bits, group_size or 128), weight.decoded)


@pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "zeros"])
def test_pack_quantized_with_a_group_index(is_symmetric: bool):
    weight = compressed(64, 128, is_symmetric=is_symmetric, is_reordered=True)
    same_bits(decode(weight, "compressed-tensors", 4, 32), weight.decoded)


def test_a_group_index_that_was_never_set_means_groups_in_order():
    weight = compressed(64, 128)
    weight.parts["weight_g_idx"] = torch.full((128,), -1, dtype=torch.int32)
    same_bits(decode(weight, "compressed-tensors", 4, 32), weight.decoded)


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7])
def test_columns_that_end_inside_a_word(bits: int):
    weight = compressed(40, 61, bits=bits, group_size=None, is_symmetric=False)
    same_bits(decode(weight, "compressed-tensors", bits, 61), weight.decoded)


def test_version_1_adds_to_whole_words():
    """GPTQModel subtracts from whole words too, so that a zero point of 0 comes back as it was."""
    weight = gptq(32, 32, version=1)
    zeros = torch.zeros(1, 32, dtype=torch.int64)
    weight.parts["qzeros"] = pack_stream(zeros, 4) - 0x11111111
    codes = unpack(weight.parts["qweight"].t().contiguous(), 4)
    expected = codes.to(F16) * weight.parts["scales"].t()
    same_bits(decode(weight, "GPTQ", 4, 32, zeros_less_one=True), expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_any_number_of_bits_are_unpacked(bits: int):
    codes = torch.randint(0, 2**bits, (3, 64), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpack(pack_stream(codes, bits), bits), codes.to(torch.uint8))


@pytest.mark.parametrize("group", [-1, 4])
def test_groups_that_there_are_not_are_refused(group: int):
    weight = gptq(32, 128)
    weight.parts["g_idx"][7] = group
    with pytest.raises(CodecError, match="group index names a group that is none of its 4"):
        decode(weight, "GPTQ", 4, 32)


def test_many_chunks_are_one_weight():
    """More values than are decoded at a time, with a last chunk that is cut."""
    weight = gptq(1056, 640, group_size=128)
    same_bits(decode(weight, "GPTQ", 4, 128, zeros_less_one=True), weight.decoded)
    weight = awq(1064, 640, group_size=128)
    same_bits(decode(weight, "AWQ", 4, 128), weight.decoded)
    weight = compressed(1037, 640, group_size=128, is_symmetric=False)
    same_bits(decode(weight, "compressed-tensors", 4, 128), weight.decoded)
