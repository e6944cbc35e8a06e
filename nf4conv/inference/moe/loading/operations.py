"""Makes Experts4bit of packed tensors, or decodes a router, for the converters of transformers.

Imports transformers, and is imported when it is loading a checkpoint.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, ErnieFuseAndSplitTextVisionExperts

from nf4conv.codec.ops import dequantize_4bit
from nf4conv.codec.quant_state import QuantState
from nf4conv.errors import CodecError
from nf4conv.format.layout import COMPONENT_SUFFIXES, parts_of
from nf4conv.inference.experts.packed import PackedExperts, split_stack, stack_experts
from nf4conv.inference.moe.loading.headers import AGAIN
from nf4conv.inference.moe.tensor import Experts4bit
from nf4conv.inference.moe.weight import ALTERNATING, AS_STORED, SEPARATED, PackedWeight


class ExpertsDeserialize(ConversionOps):
    """Makes Experts4bit of the packed tensors of one parameter.

    Tensors of a layer that is not packed go through the model's own operations.

    Attributes:
        sources: patterns of the names of packed weights, one for each part of the parameter.
        own_sources: the patterns of the model's own converter for the same parts.
        operations: the operations of the model's own converter; none if it has none for these
            names.
        hf_quantizer: transformers' quantizer. If an operation lacks this attribute, transformers
            casts absmax and its scales to the model's dtype.
        refused: why the tensors of the last parameter were refused; None if they were not.
    """

    supports_many_to_many = True

    def __init__(
        self,
        sources: Sequence[str],
        own_sources: Sequence[str],
        operations: Sequence[Any],
        hf_quantizer: Any,
    ) -> None:
        self.sources = tuple(sources)
        self.own_sources = tuple(own_sources)
        self.operations = tuple(operations)
        self.hf_quantizer = hf_quantizer
        self.refused: CodecError | None = None

    @property
    def patterns(self) -> list[str]:
        """The patterns of the names of components and codes."""
        components = [f"{one}.{suffix}" for one in self.sources for suffix in COMPONENT_SUFFIXES]
        return components + [f"{source}$" for source in self.sources]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertsDeserialize":
        """Returns itself: transformers copies operations for every tensor, and needs one."""
        return self

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: Sequence[str] = (),  # noqa: ARG002 - transformers gives it
        target_patterns: Sequence[str] = (),
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Makes the parameters, by their target patterns, that transformers collected these tensors
        for: lists by the pattern that their names match.

        `full_layer_name` is the whole name of the first; the model has its parameters on the meta
        device.
        """
        collected = [_collected(input_dict, source) for source in self.sources]
        if all(len(tensors) == 1 for tensors in collected):  # codes only: in 16 bits
            return self._as_the_model_does(
                input_dict,
                target_patterns=list(target_patterns),
                full_layer_name=full_layer_name,
                model=model,
                **kwargs,
            )
        made = {}
        self.refused = None
        try:
            for place, target in enumerate(target_patterns):
                name = full_layer_name.replace(target_patterns[0], target)
                shares = [_share(tensors, place, len(target_patterns)) for tensors in collected]
                made[target] = self._make_parameter(shares, name, model)
        except CodecError as error:
            self.refused = error
            raise
        return made

    def _as_the_model_does(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Runs the model's own operations on a layer that is not packed."""
        dtype = dtype_of(kwargs["model"], kwargs["full_layer_name"])
        result: dict[str, Any] = {}
        for source, own in zip(self.sources, self.own_sources, strict=True):
            result[own] = [tensor.to(dtype) for tensor in input_dict[f"{source}$"]]
        for operation in self.operations:
            result = operation.convert(result, source_patterns=list(self.own_sources), **kwargs)
        if self.operations:
            return result
        (tensors,) = result.values()
        return {kwargs["target_patterns"][0]: tensors}

    def _make_parameter(
        self, tensors: list[dict[str, list[torch.Tensor]]], name: str, model: Any
    ) -> Any:
        """Makes the parameter of this name, in the orientation that the model has, of the codes
        ("") and the components of each part, by suffix.
        """
        parts = []
        for source, own in zip(self.sources, tensors, strict=True):
            parts.append(pack_part(own, f"{name} ({readable(source)})"))
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        expected = getattr(module, leaf)
        stored = PackedWeight(tuple(parts), self._rows(parts, module))
        is_transposed = self._is_transposed(stored, expected.shape, module, name)
        if is_transposed and stored.rows == SEPARATED:
            raise CodecError(f"{name}: rows by turns and transposed: no such layout is known")
        weight = replace(stored, is_transposed=is_transposed)
        return torch.nn.Parameter(Experts4bit(weight, dtype_of(model, name)), requires_grad=False)

    def _rows(self, parts: list[PackedExperts], module: Any) -> str:
        """Returns how the rows of the parameter come from those of its parts."""
        if any(type(operation).__name__ == "Interleave" for operation in self.operations):
            return SEPARATED
        if len(parts) == 2 and not getattr(module, "is_concatenated", True):
            return ALTERNATING
        return AS_STORED

    def _is_transposed(
        self, weight: PackedWeight, expected: torch.Size, module: Any, name: str
    ) -> bool:
        """Returns True if the parameter has the transposed matrices.

        The shape tells. For square matrices, the model's own operations or its module tell.
        """
        experts, (rows, columns) = weight.experts, weight.matrix_shape
        stored, transposed = (experts, rows, columns), (experts, columns, rows)
        if tuple(expected) not in (stored, transposed):
            raise CodecError(
                f"{name}: {experts} experts of {rows} × {columns} in the files, "
                f"but the model's config wants {list(expected)}: take the config.json that was "
                f"written with these files, or {AGAIN}"
            )
        if rows != columns:
            return tuple(expected) == transposed
        if not _are_single(self.sources[0]):
            return any(
                type(operation).__name__ == "Transpose" and not operation.check_dims
                for operation in self.operations
            )
        return has_transposed_experts(module)


class SharedExpertsDeserialize(ExpertsDeserialize, ErnieFuseAndSplitTextVisionExperts):
    """Loads a list of experts that two parameters share.

    transformers before 5.20 lets an operation have several targets only if it is of the class
    ErnieFuseAndSplitTextVisionExperts.
    """


def readable(pattern: str) -> str:
    """Returns a pattern of names as it is written in a sentence: `experts.*.gate_proj.weight`."""
    plain = pattern.replace(r"(?<!\w)", "").replace(r"\d+", "*")
    return plain.replace("\\", "").lstrip(".")


def _are_single(pattern: str) -> bool:
    """Returns whether a pattern of names is one of single experts: it has their number."""
    return r"\d+" in pattern


def has_transposed_experts(module: Any) -> bool:
    """Returns True if a module of experts holds its matrices as [in, out].

    Its attribute `is_transposed` tells. Without one, the shape of gate_up_proj does: its outputs
    are gate and up, so they are more than its inputs.
    """
    known = getattr(module, "is_transposed", None)
    if known is not None:
        return bool(known)
    gate_up = getattr(module, "gate_up_proj", None)
    return gate_up is not None and gate_up.dim() == 3 and gate_up.shape[2] > gate_up.shape[1]


def _collected(input_dict: dict[str, Any], source: str) -> dict[str, list[torch.Tensor]]:
    """Returns the codes ("") and the components of one part, by suffix."""
    found = {}
    if f"{source}$" in input_dict:
        found[""] = input_dict[f"{source}$"]
    return found | parts_of(source, input_dict)


def _share(
    tensors: dict[str, list[torch.Tensor]], place: int, targets: int
) -> dict[str, list[torch.Tensor]]:
    """Returns one of equal shares of the experts.

    Ernie-VL has the experts for text first, then those for vision.
    """
    shared = {}
    for suffix, found in tensors.items():
        count = -(-len(found) // targets)
        shared[suffix] = found[place * count : (place + 1) * count]
    return shared


def pack_part(tensors: dict[str, list[torch.Tensor]], name: str) -> PackedExperts:
    """Makes the experts of one projection of what is on disk, single experts or a stack: codes ("")
    and components by suffix.

    Raises CodecError, with the projection's name, if a tensor is missing or contradicts another.
    """
    codes = tensors.get("", [])
    # the headers have all components of all experts, but perhaps some of NF4 and some of FP4
    counts = {suffix or "codes": len(found) for suffix, found in tensors.items()}
    if set(counts.values()) != {len(codes)}:
        raise CodecError(f"{name}: experts differ in their tensors: {counts}; {AGAIN}")
    states = []
    for expert in range(len(codes)):
        parts = {suffix: found[expert] for suffix, found in tensors.items() if suffix}
        states.append(QuantState.from_components(parts))
    try:
        if len(states) == 1 and len(states[0].shape) == 3:
            return split_stack(codes[0], states[0])
        return stack_experts(codes, states)
    except (CodecError, RuntimeError) as error:
        raise CodecError(f"{name}: {error}; {AGAIN}") from error


class RouterDeserialize(ConversionOps):
    """Makes weights of modules other than Linear4bit what they are in a checkpoint of 16 bits.

    Packed ones are decoded: transformers 4 packed routers, too. Others are cast to the dtype that
    the model is loaded in: transformers leaves them in that of the files, where experts and layers
    of it could not compute together.

    Attributes:
        operation: transformers' own operation, which converts everything else.
        hf_quantizer: transformers' quantizer. If an operation lacks this attribute, transformers
            casts absmax and its scales to the model's dtype.
    """

    def __init__(self, operation: Any) -> None:
        self.operation = operation
        self.hf_quantizer = operation.hf_quantizer

    def __deepcopy__(self, memo: dict[int, Any]) -> "RouterDeserialize":
        """Returns itself: it has no state."""
        return self

    def convert(
        self,
        input_dict: dict[str, Any],
        model: Any = None,
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Decodes or casts the weight, or leaves it to transformers if its module is a Linear4bit.

        Raises CodecError if components of a packed one are missing or contradict each other.
        """
        from bitsandbytes.nn import Linear4bit  # type: ignore[attr-defined]

        if isinstance(model.get_submodule(full_layer_name.rpartition(".")[0]), Linear4bit):
            result: dict[str, Any] = self.operation.convert(
                input_dict, model=model, full_layer_name=full_layer_name, **kwargs
            )
            return result
        tensors = {}
        for name, tensor in input_dict.items():
            component = name.removeprefix("weight.")
            tensors[component] = tensor[0] if isinstance(tensor, list) else tensor
        weight = tensors.pop("weight")
        dtype = dtype_of(model, full_layer_name)
        if not tensors:
            return {"weight": weight.to(dtype)}
        state = QuantState.from_components(tensors)
        return {"weight": dequantize_4bit(weight, state, dtype=dtype)}


def dtype_of(model: Any, name: str) -> torch.dtype:
    """Returns the dtype that a parameter is loaded in from a checkpoint of 16 bits."""
    path, _, leaf = name.rpartition(".")
    dtype: torch.dtype = getattr(model.get_submodule(path), leaf).dtype
    kept: dict[str, torch.dtype] = model._get_dtype_plan(dtype)  # for example, routers in float32
    for pattern in kept:
        if re.search(pattern.replace("*", ".*"), name):
            return kept[pattern]
    return dtype
