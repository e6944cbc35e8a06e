"""Presents the tensors that another quantization encoded as the float tensors they stand for.

Names and dtypes tell which tensors belong together and how they decode; their shapes are checked.
The formats are classes: integers.py, floats.py and bitsandbytes.py. Tensors that are left over and
belong to activations are dropped.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_BITS, FLOAT_TAGS, TORCH_NAMES
from nf4conv.format.layout import QUANT_STATE_PREFIX
from nf4conv.models.config import checkpoint_dtype
from nf4conv.models.families import families_of
from nf4conv.models.module_names import module_of
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.foreign.config import describe
from nf4conv.sources.foreign.floats import (
    Bitsandbytes8bit,
    CompressedFp4,
    GptOss,
    PlainFp4,
    Scaled,
)
from nf4conv.sources.foreign.formats import Foreign, SiblingTensors
from nf4conv.sources.foreign.integers import Awq, CompressedIntegers, Gptq, TorchaoInt4
from nf4conv.sources.reader import read_bytes
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo

FORMATS: Final[list[type[Foreign]]] = [
    GptOss,
    CompressedIntegers,
    Gptq,
    Awq,
    TorchaoInt4,
    CompressedFp4,
    PlainFp4,
    Bitsandbytes4bit,
    Bitsandbytes8bit,
    Scaled,
]
"""The first format that recognises a tensor decides."""

_PLAIN_DTYPES: Final = (*FLOAT_TAGS, "I64", "BOOL")
"""Dtypes of tensors that are stored as they are."""

_UNREAD_DTYPES: Final = ("F8_E8M0", "U32", *(DTYPE_BITS.keys() - TORCH_NAMES.keys()))
"""Dtypes of tensors that nf4conv cannot read unless they are part of an encoding."""

_ENDS_OF_ACTIVATIONS: Final = (
    ".input_scale", ".input_scale_ub", ".input_global_scale", ".input_zero_point",
    ".activation_scale",
    ".output_scale", ".qscale_act", ".k_scale", ".v_scale", ".q_scale", ".kv_scale",
    ".k_zero_point", ".v_zero_point", ".q_zero_point", ".output_zero_point", ".k_global_scale",
    ".v_global_scale", ".q_global_scale", ".prob_scale", ".attn_scale", ".weight_format",
    "_act_quant_scale", "_act_quant_zero_point",
)  # fmt: skip
"""Ends of the names of tensors that a quantized model needs to run, and a decoded one does not."""

_ENDS_OF_WEIGHTS: Final[tuple[str, ...]] = (
    ".W_q", ".pre_quant_scale", ".bitmask", ".w_bf16_to_fp8_scale", "_act_pre_scale",
    "_scale_and_zero", "_per_tensor_scale", ".input_rotation", ".input_prescale",
    ".scale_weight", "scaled_fp8", ".comfy_quant",  # of ComfyUI, whose files have no config
    ".weight._scale",  # of quanto alone
    ".svdquant_lora_a", ".svdquant_lora_b", ".weight_quantizer._scale",  # of ModelOpt
    *(end for kind in FORMATS for end in kind.ends),
)  # fmt: skip
"""Ends of the names of parts of encoded weights.

A part that no rule uses means that the encoding is not understood.
"""


def decoded_tensors(
    source: Source, exported: Mapping[str, Any]
) -> tuple[tuple[TensorInfo, ...], tuple[str, ...]]:
    """Replaces the encoded tensors of a checkpoint by the tensors that they decode to; returns them
    in their order, and lines for the user.

    No data is read but small descriptions. `exported` is as of `describe`.
    """
    tensors = source.tensors
    config = source.config or {}
    description = describe(config, exported)
    method = description.method
    found: dict[str, TensorInfo] = {}
    # every encoding has parts in a dtype that is not plain
    if any(tensor.dtype not in _PLAIN_DTYPES for tensor in tensors):
        siblings = SiblingTensors(
            by_name=source.by_name,
            description=description,
            dtype="F16" if checkpoint_dtype(config) == "float16" else "BF16",
            families=families_of(config),
            read=partial(read_bytes, absent=source.absent),
        )
        has_states = any(QUANT_STATE_PREFIX in name for name in siblings.by_name)
        for tensor in tensors:
            logical = _decoded(tensor, siblings, has_states)
            if logical is not None:
                found[tensor.name] = logical
    if not found and method is None:
        _check_unused(tensors, method, {})
        return tensors, ()
    return _replaced(tensors, found, method), _notes(method, found)


@lru_cache(maxsize=4096)  # models have few ends of names and many tensors
def _formats_of(
    end: str, dtype: str, method: str | None, packing: str | None, has_states: bool
) -> tuple[type[Foreign], ...]:
    """Returns the formats of a config whose values may have such a dtype, and names that end so."""
    found = []
    for kind in FORMATS:
        has_name = end.endswith(kind.stored) or kind.stored.endswith(end)
        has_dtype = any(dtype in form.dtypes for form in kind.layout["values"].forms)
        is_named = not kind.configs or method in kind.configs or packing in kind.configs
        if has_name and has_dtype and is_named and (has_states or kind is not Bitsandbytes4bit):
            found.append(kind)
    return tuple(found)


def _decoded(tensor: TensorInfo, siblings: SiblingTensors, has_states: bool) -> TensorInfo | None:
    """Returns the tensor that values decode to; None if a tensor holds no encoded values."""
    name = tensor.name
    end = name[name.rfind(".") + 1 :]
    described = siblings.description
    may_be = _formats_of(end, tensor.dtype, described.method, described.packing, has_states)
    if not may_be or name.endswith(Bitsandbytes4bit.ends) or siblings.is_scale(tensor):
        return None
    for kind in may_be:
        found = kind.recognised(tensor, siblings)
        if found is not None:
            return found
    return None


def _replaced(
    tensors: Sequence[TensorInfo], found: Mapping[str, TensorInfo], method: str | None
) -> tuple[TensorInfo, ...]:
    """Puts decoded tensors in the place of their values, by the names of these, and drops their
    other parts.
    """
    parts = set()
    for logical in found.values():
        assert logical.encoding is not None
        for _, part in logical.encoding.parts:
            parts.add(part.name)
    decoded_names = {logical.name for logical in found.values()}
    kept = []
    rest = []
    for tensor in tensors:
        name = tensor.name
        if name in found:
            kept.append(found[name])
        elif name in decoded_names:
            raise SourceError.about(tensor.file, name, "is there twice, as it is and quantized")
        elif name in parts or name.removesuffix("_shape") in decoded_names:
            continue
        elif not name.endswith(_ENDS_OF_ACTIVATIONS):
            rest.append(tensor)
            kept.append(tensor)
    _check_unused(rest, method, found)
    return tuple(kept)


def _notes(method: str | None, found: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """Returns a line about what is decoded, if anything is."""
    counts: Counter[str] = Counter()
    for logical in found.values():
        assert logical.encoding is not None
        counts[logical.encoding.name] += 1
    if not counts:
        return ()
    listed = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    by = f" ({method})" if method else ""
    return (f"the source is quantized{by}: {listed}",)


def _check_unused(
    tensors: Sequence[TensorInfo], method: str | None, found: Mapping[str, TensorInfo]
) -> None:
    """Raises a SourceError if a tensor is part of a weight that no rule decodes, or may scale one
    that is decoded.
    """
    ends = _ENDS_OF_WEIGHTS
    dtypes = _UNREAD_DTYPES
    if method in ("gptq", "awq", "auto-round", "quark"):
        # of activations that AWQ scales, which no plain model has; words in other layouts
        ends += (".scales",)
        dtypes += ("I32",)
    casts = set()  # 8-bit floats without scales
    for logical in found.values():
        if isinstance(logical.encoding, Scaled) and logical.encoding.scale is None:
            casts.add(module_of(logical.name))
    for tensor in tensors:
        module, _, leaf = tensor.name.rpartition(".")
        # no model has a matrix of integers before it is quantized
        is_matrix = leaf == "weight" and len(tensor.shape) > 1 and tensor.encoding is None
        is_unread = tensor.encoding is None and tensor.dtype in dtypes
        is_code = method is not None and is_matrix and tensor.dtype[0] in "IU"
        may_scale = "scale" in leaf and module in casts
        if is_unread or is_code or may_scale or tensor.name.endswith(ends):
            raise SourceError.about(
                tensor.file,
                tensor.name,
                "part of a weight that is already quantized in a way that nf4conv does not decode; "
                "give the checkpoint that it was made from",
            )
