"""QuantState: what is needed to decode a packed weight, and its form on disk.

The attributes are bitsandbytes' own (`absmax, shape, code, blocksize, quant_type, dtype, offset,
state2, nested`), so that `dequantize_4bit` takes either library's state without a conversion.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from nf4conv.errors import CodecError
from nf4conv.format import layout
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.layout import COMPONENT_SUFFIXES, QUANT_STATE_PREFIX

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@cache
def code_table(data_type: str, device: torch.device) -> torch.Tensor:
    """The values of codes, never to be written to: [16] float32 of "nf4" and "fp4" (`quant_map` on
    disk), [256] of "dynamic" (`nested_quant_map`).
    """
    values = DYNAMIC_MAP if data_type == "dynamic" else CODEBOOKS[data_type].values
    with torch.inference_mode(
        mode=False
    ):  # a tensor made in that mode, and kept, could not be trained with later
        return torch.tensor(values, dtype=torch.float32, device=device)


@dataclass
class NestedState:
    """How a quantized absmax is decoded: `code[absmax] * self.absmax[block] + offset`; the offset
    is QuantState's.
    """

    absmax: torch.Tensor  # [ceil(blocks / 256)] float32
    code: torch.Tensor  # [256] float32
    blocksize: int = NESTED_BLOCKSIZE  # 256, the only value bitsandbytes knows
    dtype: torch.dtype = torch.float32  # float32, of the absmax before it was quantized


class Decoding(NamedTuple):
    """What the codes of a packed weight of n elements are decoded by."""

    absmax: torch.Tensor  # [ceil(n / blocksize)] float32, or uint8 codes with `state2`
    state2: NestedState | None  # how absmax is decoded; None when it is float32
    offset: torch.Tensor | None  # 0-d float32, added to the decoded absmax; None without `state2`
    quant_type: str  # "nf4" or "fp4"
    blocksize: int  # elements that share one absmax, a power of two from 32 to 4096
    scales: str = "absmax"  # what absmax is; "search" widens the bound of errors, and nothing else

    def pointers(self) -> tuple[torch.Tensor, ...]:
        """What kernels read: absmax; and the code, nested absmax and offset that decode it, or
        absmax instead.
        """
        if self.state2 is None or self.offset is None:
            return (self.absmax,) * 4
        return self.absmax, self.state2.code, self.state2.absmax, self.offset

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What custom operators take, which know no classes: absmax, nested absmax, its code,
        offset.
        """
        nested = (None, None) if self.state2 is None else (self.state2.absmax, self.state2.code)
        return self.absmax, *nested, self.offset


@dataclass
class QuantState:
    """Everything but the packed codes of a 4-bit weight."""

    absmax: torch.Tensor  # [blocks] float32, or uint8 codes when nested
    shape: torch.Size  # of the weight
    dtype: (
        torch.dtype
    )  # of the weight: float32, float16 or bfloat16; what `dequantize_4bit` returns by default
    blocksize: int  # elements that share one absmax, 32 … 4096
    quant_type: str  # "nf4" or "fp4"
    code: torch.Tensor  # [16] float32
    offset: torch.Tensor | None = None  # 0-d float32, on absmax's device; None unless nested
    state2: NestedState | None = None  # how absmax itself is decoded; None unless nested

    @property
    def nested(self) -> bool:
        return self.state2 is not None

    def components(self) -> dict[str, torch.Tensor]:
        """The tensors that stand beside the packed codes on disk: suffix → tensor, as
        layout.components lists them.

        Reads the offset back from the device, which waits for it.
        """
        format = layout.Format(
            self.quant_type, self.blocksize, self.nested, DTYPE_NAMES[self.dtype]
        )
        blob = layout.quant_state_json(
            format, self.shape, None if self.offset is None else float(self.offset.item())
        )
        parts = {"absmax": self.absmax, "quant_map": self.code}
        if self.state2 is not None:
            parts |= {"nested_absmax": self.state2.absmax, "nested_quant_map": self.state2.code}
        parts[f"{QUANT_STATE_PREFIX}{self.quant_type}"] = torch.frombuffer(
            bytearray(blob), dtype=torch.uint8
        )
        return parts

    @classmethod
    def from_components(cls, parts: Mapping[str, torch.Tensor]) -> "QuantState":
        """The inverse of `components`; keys may carry any prefix that ends in a dot.

        The stored nested_quant_map is used as it is: releases of bitsandbytes before 0.45.3 wrote
        low-precision maps. A CodecError if a component is missing, unknown or contradicts another.
        """
        named = _by_suffix(parts)
        tag = next(suffix for suffix in named if suffix.startswith(QUANT_STATE_PREFIX))
        fields = layout.parse_quant_state(bytes(named[tag].cpu().numpy().tobytes()))
        absmax = _component(named, "absmax")
        device = absmax.device
        offset: torch.Tensor | None = None
        state2: NestedState | None = None
        if "nested_absmax" in named:
            offset = torch.tensor(
                layout.nested_offset_of(fields), dtype=torch.float32, device=device
            )
            state2 = NestedState(named["nested_absmax"], _component(named, "nested_quant_map"))
        expected = torch.uint8 if state2 is not None else torch.float32
        if absmax.dtype != expected:
            raise CodecError(f"absmax: {absmax.dtype}, expected {expected}")
        return cls(
            absmax=absmax,
            shape=torch.Size(fields["shape"]),
            dtype=DTYPES[fields["dtype"]],
            blocksize=fields["blocksize"],
            quant_type=fields["quant_type"],
            code=code_table(fields["quant_type"], device),
            offset=offset,
            state2=state2,
        )


def decoding_of(state: QuantState) -> Decoding:
    """What a state, ours or bitsandbytes', says of decoding."""
    return Decoding(state.absmax, state.state2, state.offset, state.quant_type, state.blocksize)


def _by_suffix(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for key, tensor in parts.items():
        suffix = next((s for s in COMPONENT_SUFFIXES if key == s or key.endswith(f".{s}")), None)
        if suffix is None:
            raise CodecError(
                f"{key}: not a component of a 4-bit weight; expected "
                f"{', '.join(COMPONENT_SUFFIXES)}"
            )
        # "nested_absmax" does not end in ".absmax", so a suffix is unambiguous
        named[suffix] = tensor
    tags = [suffix for suffix in named if suffix.startswith(QUANT_STATE_PREFIX)]
    if len(tags) != 1:
        raise CodecError(
            f"{len(tags)} quant_state tensors among {sorted(parts)}, expected exactly one"
        )
    return named


def _component(named: Mapping[str, torch.Tensor], suffix: str) -> torch.Tensor:
    if suffix not in named:
        raise CodecError(f"the component {suffix} is missing beside {sorted(named)}")
    return named[suffix]
