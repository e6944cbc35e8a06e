"""QuantState decodes a packed weight; it becomes the tensors that stand beside the codes on disk,
and is made from them.

Its attributes have bitsandbytes' names (`absmax, shape, code, blocksize, quant_type, dtype, offset,
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
    """Returns the values of codes: [16] of "nf4" or "fp4" (`quant_map` on disk), or the 256 of
    "dynamic" (`nested_quant_map`). The tensor is shared: never write to it.
    """
    values = DYNAMIC_MAP if data_type == "dynamic" else CODEBOOKS[data_type].values
    # a tensor that is made in inference mode, and kept, could not be trained with later
    with torch.inference_mode(mode=False):
        return torch.tensor(values, dtype=torch.float32, device=device)


@dataclass
class NestedState:
    """Decodes a quantized absmax: `code[absmax] * self.absmax[block] + offset`; QuantState has the
    offset.

    Attributes:
        absmax: [ceil(blocks / 256)] float32, `nested_absmax` on disk.
        code: [256] float32, `nested_quant_map` on disk.
        blocksize: 256, the only value that bitsandbytes knows.
        dtype: of the absmax before it was quantized: float32.
    """

    absmax: torch.Tensor
    code: torch.Tensor
    blocksize: int = NESTED_BLOCKSIZE
    dtype: torch.dtype = torch.float32


class Form(NamedTuple):
    """Says how weights are packed: what a kernel is compiled and prepared for.

    Attributes:
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax, a power of two from 32 to 4096.
        nested: True if absmax is uint8 codes.
    """

    quant_type: str
    blocksize: int
    nested: bool


Addresses = tuple[int, int, int, int, int]
"""Of the tensors that kernels read of a weight: packed codes, then `Decoding.pointers`."""


class Decoding(NamedTuple):
    """Decodes the codes of a packed weight of n elements: what backends need of a QuantState.

    Attributes:
        absmax: [ceil(n / blocksize)] float32, or uint8 codes with double quantization.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax, a power of two from 32 to 4096.
        nested_absmax, nested_code: [ceil(blocks / 256)] and [256] float32, of NestedState; they and
            the offset are None without double quantization.
        offset: 0-d float32, added to the decoded absmax.
        scales: "absmax" or "search", which found the absmax; "search" widens the bound of errors,
            and nothing else.
    """

    absmax: torch.Tensor
    quant_type: str
    blocksize: int
    nested_absmax: torch.Tensor | None = None
    nested_code: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    scales: str = "absmax"

    def form(self) -> Form:
        """Returns what kernels are prepared for."""
        return Form(self.quant_type, self.blocksize, self.offset is not None)

    def addresses(self, packed: torch.Tensor) -> Addresses:
        """Returns where kernels find a weight with these packed codes."""
        first, second, third, fourth = [tensor.data_ptr() for tensor in self.pointers()]
        return packed.data_ptr(), first, second, third, fourth

    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what kernels read: absmax, and the code, nested absmax and offset that decode it.

        Without double quantization, absmax stands in the place of the other three.
        """
        absmax = self.absmax
        if self.nested_code is None or self.nested_absmax is None or self.offset is None:
            return absmax, absmax, absmax, absmax
        return absmax, self.nested_code, self.nested_absmax, self.offset

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Returns absmax, nested absmax, its code and the offset, for torch's custom operators,
        which take no classes.
        """
        return self.absmax, self.nested_absmax, self.nested_code, self.offset


@dataclass
class QuantState:
    """Everything but the packed codes of a 4-bit weight.

    Attributes:
        absmax: [ceil(n / blocksize)] float32, or uint8 codes with double quantization.
        shape: of the weight, n elements.
        dtype: of the weight: float32, float16 or bfloat16. `dequantize_4bit` returns it by default.
        blocksize: elements that share one absmax: 32, 64, … 4096.
        quant_type: "nf4" or "fp4".
        code: [16] float32, the values of the codes.
        offset: 0-d float32, added to the decoded absmax; None without double quantization.
        state2: decodes absmax; None without double quantization.

    Example:
        packed, state = nf4conv.quantize_4bit(weight)
        on_disk = {"w.weight": packed}
        for suffix, tensor in state.components().items():
            on_disk[f"w.weight.{suffix}"] = tensor
        ...
        packed = on_disk.pop("w.weight")
        state = nf4conv.QuantState.from_components(on_disk)
    """

    absmax: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    blocksize: int
    quant_type: str
    code: torch.Tensor
    offset: torch.Tensor | None = None
    state2: NestedState | None = None

    @property
    def nested(self) -> bool:
        """True with double quantization: absmax is quantized too."""
        return self.state2 is not None

    def components(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that stand beside the packed codes on disk, as bitsandbytes writes
        them.

        Reads the offset back from the device, which waits for it.

        Returns:
            By suffix, what follows the weight's name and a dot: "absmax", [blocks] float32 or
            uint8; "quant_map", [16] float32; with double quantization "nested_absmax",
            [ceil(blocks / 256)] float32, and "nested_quant_map", [256] float32; and
            "quant_state.bitsandbytes__nf4" (or "__fp4"), JSON as uint8, on the CPU.
        """
        format = layout.Format(
            self.quant_type, self.blocksize, self.nested, DTYPE_NAMES[self.dtype]
        )
        nested_offset = None
        if self.offset is not None:
            nested_offset = float(self.offset.item())
        blob = layout.quant_state_json(format, self.shape, nested_offset)
        parts = {"absmax": self.absmax, "quant_map": self.code}
        if self.state2 is not None:
            parts["nested_absmax"] = self.state2.absmax
            parts["nested_quant_map"] = self.state2.code
        json_name = f"{QUANT_STATE_PREFIX}{self.quant_type}"
        parts[json_name] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        return parts

    @classmethod
    def from_components(cls, parts: Mapping[str, torch.Tensor]) -> "QuantState":
        """Makes a state of the tensors that stand beside the packed codes on disk.

        Args:
            parts: the tensors that `components` returns, by suffix, or by names that end in a dot
                and a suffix.

        Returns:
            The state, on the device of absmax.

        Raises:
            CodecError: a component is missing, unknown or contradicts another.
        """
        named = _by_suffix(parts)
        json_name = next(suffix for suffix in named if suffix.startswith(QUANT_STATE_PREFIX))
        blob = bytes(named[json_name].cpu().numpy().tobytes())
        is_nested = "nested_absmax" in named
        fields = layout.parse_quant_state(blob, is_nested)
        absmax = named["absmax"]
        expected = torch.uint8 if is_nested else torch.float32
        if absmax.dtype != expected:
            raise CodecError(f"absmax: {absmax.dtype}, expected {expected}")
        return described_state(
            absmax=absmax,
            nested_absmax=named.get("nested_absmax"),
            nested_quant_map=named.get("nested_quant_map"),
            shape=fields.shape,
            dtype=DTYPES[fields.format.dtype],
            quant_type=fields.format.quant_type,
            blocksize=fields.format.blocksize,
            nested_offset=fields.nested_offset,
        )


def described_state(
    *,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None = None,
    nested_quant_map: torch.Tensor | None = None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quant_type: str,
    blocksize: int,
    nested_offset: float | None,
    **unread: torch.Tensor,  # noqa: ARG001
) -> QuantState:
    """Returns the state of a weight of which all is known that its JSON says.

    The code map is the standard one of the data type. The stored nested_quant_map is used as it is:
    releases of bitsandbytes before 0.45.3 wrote low-precision maps.
    """
    offset = None
    state2 = None
    if nested_absmax is not None and nested_quant_map is not None:
        offset = torch.tensor(nested_offset, dtype=torch.float32, device=absmax.device)
        state2 = NestedState(nested_absmax, nested_quant_map)
    code = code_table(quant_type, absmax.device)
    whole = torch.Size(shape)
    return QuantState(absmax, whole, dtype, blocksize, quant_type, code, offset, state2)


def decoding_of(state: QuantState) -> Decoding:
    """Returns what backends need of a state, ours or bitsandbytes'."""
    plain = Decoding(state.absmax, state.quant_type, state.blocksize)
    nested = state.state2
    if nested is None:
        return plain
    return Decoding(*plain[:3], nested.absmax, nested.code, state.offset)


def _by_suffix(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Strips the prefixes of names; raises CodecError unless all are components, one of them a
    quant_state, and none of those is missing that decode absmax.
    """
    named: dict[str, torch.Tensor] = {}
    for key, tensor in parts.items():
        _, suffix = layout.split_component(f".{key}")
        if suffix not in COMPONENT_SUFFIXES:
            raise CodecError(
                f"{key}: not a component of a 4-bit weight; "
                f"expected {', '.join(COMPONENT_SUFFIXES)}"
            )
        named[suffix] = tensor
    tags = [suffix for suffix in named if suffix.startswith(QUANT_STATE_PREFIX)]
    if len(tags) != 1:
        raise CodecError(
            f"{len(tags)} quant_state tensors among {sorted(parts)}, expected exactly one"
        )
    for suffix in ("absmax", "nested_quant_map") if "nested_absmax" in named else ("absmax",):
        if suffix not in named:
            raise CodecError(f"the component {suffix} is missing beside {sorted(named)}")
    return named
