"""Weights of packed integers, packed and decoded as the methods themselves do it.

compressed-tensors is a package of the tests: its own functions pack and decode. GPTQModel and
AutoAWQ are not, since they need the tools to build for a GPU. So what they do is restated here, an
element at a time where that is clearer:

GPTQ    GPTQModel 7.7.0: pack_original of gptqmodel/nn_modules/qlinear/__init__.py packs,
        convert_gptq_v1_to_v2_format_module of gptqmodel/utils/model.py corrects zero points,
        _dequantize_from_codes of the former decodes
AWQ     AutoAWQ 0.2.9: WQLinear_GEMM.from_linear of awq/modules/linear/gemm.py packs,
        dequantize_gemm of awq/utils/packing_utils.py decodes
torchao torchao 0.18: its classes and the names of their fields are in
        torchao/quantization/quantize_/workflows/int4/. Int4Tensor is packed by pack_int4 of
        mslk/quantize/shuffle.py; _bf16_activations_forward of Int4WeightFakeQuantizer in
        torchao/quantization/qat/fake_quantizer.py, and _bf16i4_rowwise_kernel of MSLK, decode
"""

from dataclasses import dataclass

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Weight:
    """A quantized weight.

    Attributes:
        parts: its tensors, by what follows the module's name and a dot.
        decoded: [out, in], as the method decodes it, in the dtype of its scales.
    """

    parts: dict[str, torch.Tensor]
    decoded: torch.Tensor


def generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(numbers))


def random_codes(*shape: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=generator(*shape, bits))


def random_scales(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.rand(shape, generator=generator(*shape)) * 0.02 + 1e-4).to(dtype)


def random_index(columns: int, group_size: int) -> torch.Tensor:
    """The groups of columns that were sorted by their activations: as many of each as in order."""
    in_order = torch.arange(columns) // group_size
    return in_order[torch.randperm(columns, generator=generator(columns))].to(torch.int32)


# --- GPTQ -----------------------------------------------------------------------------------------


def pack_stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[streams, codes] packed from the lowest bits on, over the borders of words: int32."""
    words = []
    for stream in codes.tolist():
        number = sum(code << (place * bits) for place, code in enumerate(stream))
        count = -(-len(stream) * bits // 32)
        words.append([number >> (32 * word) & 0xFFFFFFFF for word in range(count)])
    unsigned = torch.tensor(words, dtype=torch.int64)
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).to(torch.int32)


def stored_zeros(zeros: torch.Tensor, bits: int, version: int) -> torch.Tensor:
    """Zero points of GPTQ, [groups, out], as they are stored."""
    if version == 2:
        return pack_stream(zeros, bits)
    if 32 % bits != 0:
        return pack_stream((zeros - 1) & 2**bits - 1, bits)
    return pack_stream(zeros, bits) - sum(1 << place for place in range(0, 32, bits))


def gptq(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group_size: int = 32,
    version: int = 1,
    is_symmetric: bool = False,
    is_reordered: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Weight:
    groups = -(-columns // group_size)
    codes = random_codes(columns, rows, bits=bits)
    scales = random_scales(groups, rows, dtype=dtype)
    zeros = random_codes(groups, rows, bits=bits)
    if is_symmetric:
        zeros = torch.full((groups, rows), 2 ** (bits - 1))
    index = (torch.arange(columns) // group_size).to(torch.int32)
    if is_reordered:
        index = random_index(columns, group_size)
    parts = {
        "qweight": pack_stream(codes.t(), bits).t().contiguous(),
        "qzeros": stored_zeros(zeros, bits, version),
        "scales": scales,
        "g_idx": index,
    }
    # what _dequantize_from_codes does
    width = torch.int16 if bits == 8 else torch.int8
    difference = codes.to(width) - zeros.to(width)[index.long()]
    return Weight(parts, (scales[index.long()] * difference).t().contiguous())


# --- AWQ ------------------------------------------------------------------------------------------


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """[lines, codes] packed as WQLinear_GEMM.from_linear does, each 8 in AWQ's order: int32."""
    lines, columns = codes.shape
    eights = codes.view(lines, columns // 8, 8)
    return pack_stream(eights[..., list(AWQ_ORDER)].flatten(1), 4)


def awq(
    rows: int, columns: int, *, group_size: int = 32, dtype: torch.dtype = torch.float16
) -> Weight:
    groups = columns // group_size
    codes = random_codes(columns, rows, bits=4)
    zeros = random_codes(groups, rows, bits=4)
    scales = random_scales(groups, rows, dtype=dtype)
    parts = {"qweight": pack_awq(codes), "qzeros": pack_awq(zeros), "scales": scales}
    # what dequantize_gemm does
    difference = codes - zeros.repeat_interleave(group_size, dim=0)
    decoded = difference * scales.repeat_interleave(group_size, dim=0)
    return Weight(parts, decoded.t().contiguous())


# --- compressed-tensors ---------------------------------------------------------------------------


def compressed(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group_size: int | None = 32,
    is_symmetric: bool = True,
    is_reordered: bool = False,
    has_packed_zeros: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Weight:
    groups = 1 if group_size is None else columns // group_size
    half = 2 ** (bits - 1)
    codes = (random_codes(rows, columns, bits=bits) - half).to(torch.int8)
    scale = random_scales(rows, groups, dtype=dtype)
    parts = {
        "weight_packed": pack_to_int32(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }
    arguments: dict[str, object] = {"num_bits": bits, "type": "int", "symmetric": is_symmetric}
    arguments |= {"strategy": "channel"}
    if group_size is not None:
        arguments |= {"strategy": "group", "group_size": group_size}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    if not is_symmetric:
        zeros = (random_codes(rows, groups, bits=bits) - half).to(torch.int8)
        packed = pack_to_int32(zeros, bits, packed_dim=0).contiguous()
        parts["weight_zero_point"] = packed
    known = dict(parts)
    order = torch.arange(columns)
    if is_reordered:
        # 0.13, the last release that reads an index, sorts columns by their groups, decodes and
        # puts them back; 0.20 decodes what lies between
        assert group_size is not None
        index = random_index(columns, group_size)
        order = torch.argsort(index, stable=True)
        known["weight_packed"] = pack_to_int32(codes[:, order].contiguous(), bits)
        parts["weight_g_idx"] = index
    decoded = PackedQuantizationCompressor.decompress(known, scheme)["weight"]
    decoded = decoded[:, torch.argsort(order)].contiguous()
    if not is_symmetric and not has_packed_zeros:
        parts["weight_zero_point"] = zeros
    return Weight(parts, decoded)


# --- torchao --------------------------------------------------------------------------------------


def torchao(
    rows: int,
    columns: int,
    *,
    group_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> Weight:
    groups = columns // group_size
    codes = random_codes(rows, columns, bits=4)
    scale = random_scales(groups, rows, dtype=dtype)
    scales = scale.t().repeat_interleave(group_size, dim=1)
    zeros = ((torch.rand(groups, rows, generator=generator(groups, rows)) - 0.5) / 8).to(dtype)
    codes = (codes - 8).to(torch.int8)
    words = codes[:, ::2] & 0xF | codes[:, 1::2] << 4
    added = zeros.t().repeat_interleave(group_size, dim=1)
    decoded = (codes.float() * scales.float() + added.float()).to(dtype)
    parts = {
        "_weight_qdata": words,
        "_weight_scale": scale,
        "_weight_zero_point": zeros,
    }
    return Weight(parts, decoded.contiguous())
