"""Lists the dtypes of tensors by safetensors' tags: every tag that safetensors 0.8 knows."""

from typing import Final

_DTYPES: Final = {
    "F64": (64, "float64"),
    "F32": (32, "float32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, ""),
    "F8_E5M2FNUZ": (8, ""),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "F4": (4, ""),
    "C64": (64, "complex64"),
    "I64": (64, "int64"),
    "I32": (32, "int32"),
    "I16": (16, "int16"),
    "I8": (8, "int8"),
    "U64": (64, "uint64"),
    "U32": (32, "uint32"),
    "U16": (16, "uint16"),
    "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
}
"""The bits of an element and torch's name of each tag; no name if nothing is computed in it."""

DTYPE_BITS: Final = {tag: bits for tag, (bits, _) in _DTYPES.items()}
TORCH_NAMES: Final = {tag: name for tag, (_, name) in _DTYPES.items() if name}

FLOAT_TAGS: Final = ("F64", "F32", "F16", "BF16")
"""Floats that a checkpoint without any quantization is stored in."""

FLOAT_DTYPES: Final = (*FLOAT_TAGS, "F8_E4M3", "F8_E5M2")
"""Floats that can be packed, and that something can be added to."""

DTYPE_NAMES: Final = {tag: TORCH_NAMES[tag] for tag in ("F32", "F16", "BF16")}
"""By the tag of a weight that can be quantized, its name in the JSON blob and in config.json."""

TAGS: Final = {name: tag for tag, name in DTYPE_NAMES.items()}

STORAGE_DTYPES: Final = {tag: TORCH_NAMES[tag] for tag in ("U8", "BF16", "F16", "F32")}
"""By tag, the dtypes that packed codes may be stored as (quant_storage in config.json): FSDP shards
only floats, all of one dtype.
"""
