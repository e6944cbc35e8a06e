"""Finds the packed experts of a checkpoint by the headers of its files, and what they lack."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nf4conv.errors import CodecError
from nf4conv.format.layout import COMPONENT_SUFFIXES, QUANT_STATE_PREFIX

AGAIN: Final = "download or quantize the checkpoint again"
"""The advice to users whose checkpoint is incomplete or damaged."""

_NESTED: Final = ("nested_absmax", "nested_quant_map")
_ONE_OF_EXPERTS: Final = re.compile(r"^(.*?experts)\.(?:(\w+)\.)?(\d+)\.(.+)$")
_UNSLOTH_GPT_OSS: Final = re.compile(r"experts\.(?:gate_up|down)_projs\.\d+\.")


@dataclass
class PackedNames:
    """The packed weights of a checkpoint, by their names in its files.

    Attributes:
        components: the suffixes of the tensors beside the codes of each weight, by its name.
        codes: the names of weights whose codes are there.
    """

    components: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    codes: set[str] = field(default_factory=set)

    @property
    def experts(self) -> list[str]:
        """The names of packed weights of experts, single ones and stacks."""
        return [name for name in self.components if _is_of_experts(name)]

    @property
    def is_unsloth_gpt_oss(self) -> bool:
        """True if experts have the names that Unsloth gives those of gpt-oss."""
        return any(_UNSLOTH_GPT_OSS.search(name) for name in self.components)


def read_packed_names(files: Iterable[str | Path]) -> PackedNames:
    """Reads the headers of safetensors files; other files are passed over."""
    from safetensors import safe_open

    found = PackedNames()
    tensors: set[str] = set()
    for file in files:
        if not str(file).endswith(".safetensors"):
            continue
        with safe_open(str(file), "pt") as handle:
            tensors.update(handle.keys())
    for name in tensors:
        weight, suffix = _split_component(name)
        if suffix:
            found.components[weight].add(suffix)
    found.codes = tensors.intersection(found.components)
    return found


def _split_component(name: str) -> tuple[str, str]:
    """Returns the weight that a component belongs to, and its suffix; "" if it is none."""
    for suffix in COMPONENT_SUFFIXES:
        if name.endswith(f".{suffix}"):
            return name.removesuffix(f".{suffix}"), suffix
    return name, ""


def _is_of_experts(name: str) -> bool:
    """Returns whether a weight is one of the routed experts' ("experts" or "block_sparse_moe")."""
    if "shared_expert" in name:
        return False
    if re.search(r"(?:^|[._])experts?\.", name) or re.search(r"experts?$", name):
        return True
    return name.endswith((".input_linear.weight", ".output_linear.weight"))


def check_completeness(names: PackedNames) -> None:
    """Raises CodecError if an expert or a component is missing.

    Layers may be mixed, packed ones beside others; experts of a projection of a layer may not.
    """
    groups: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in names.experts:
        _check_components(name, names)
        matched = _ONE_OF_EXPERTS.match(name)
        if matched:
            prefix, projections, number, rest = matched.groups()
            groups[prefix, f"{projections or ''} {rest}"][int(number)] = name
    for group in groups.values():
        _check_group(group)


def check_family(names: PackedNames, model_type: str) -> None:
    """Raises CodecError for a family whose packed experts do not fit into transformers' modules.

    Without this, transformers would leave the experts out and compute with random weights.
    """
    if model_type == "dbrx":
        raise CodecError(
            "dbrx: nf4conv loads no packed experts of this family; nf4conv dequantize brings "
            "the checkpoint back to 16 bits, and --moe portable keeps them so"
        )
    if model_type == "jetmoe" and any(map(_ONE_OF_EXPERTS.match, names.experts)):
        raise CodecError(
            "jetmoe: nf4conv loads packed experts of this family as stacks only: quantize the "
            "source with --moe stacked, or bring the checkpoint back by nf4conv dequantize"
        )


def _check_components(name: str, names: PackedNames) -> None:
    """Raises CodecError if a weight lacks codes, absmax, code values or its quant state."""
    components = names.components[name]
    missing = [suffix for suffix in ("absmax", "quant_map") if suffix not in components]
    if any(suffix in components for suffix in _NESTED):
        missing += [suffix for suffix in _NESTED if suffix not in components]
    if not any(suffix.startswith(QUANT_STATE_PREFIX) for suffix in components):
        missing.append(f"{QUANT_STATE_PREFIX}nf4")
    if name not in names.codes:
        raise CodecError(f"{name}: the packed codes are missing; {AGAIN}")
    if missing:
        raise CodecError(f"{name}.{missing[0]} is missing beside its packed codes; {AGAIN}")


def _check_group(group: Mapping[int, str]) -> None:
    """Raises CodecError unless the experts of a projection are numbered from 0 without a gap."""
    first = group[min(group)]
    for number in range(max(group) + 1):
        if number not in group:
            name = re.sub(r"\.\d+\.(?!.*\.\d+\.)", f".{number}.", first)
            raise CodecError(f"{name} is missing: experts 0 to {max(group)} are there; {AGAIN}")
