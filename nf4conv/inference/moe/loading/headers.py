"""Finds the packed experts of a checkpoint by the headers of its files, and what they lack."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nf4conv.errors import CodecError
from nf4conv.format.layout import QUANT_STATE_PREFIX, split_component

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
        tensors: the names of all tensors.
    """

    components: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    tensors: set[str] = field(default_factory=set)

    @property
    def experts(self) -> list[str]:
        """The names of packed weights of experts, single ones and stacks."""
        return [name for name in self.components if is_of_experts(name)]

    def plain_experts(self) -> list[str]:
        """Returns the names of tensors of experts that are not packed."""
        packed = set(self.components)
        for name, suffixes in self.components.items():
            packed.update(f"{name}.{suffix}" for suffix in suffixes)
        return [name for name in self.tensors - packed if is_of_experts(name)]

    @property
    def is_unsloth_gpt_oss(self) -> bool:
        """True if experts have the names that Unsloth gives those of gpt-oss."""
        return any(_UNSLOTH_GPT_OSS.search(name) for name in self.components)


def read_packed_names(files: Iterable[str | Path]) -> PackedNames:
    """Reads the headers of safetensors files; other files are passed over."""
    from safetensors import safe_open

    found = PackedNames()
    for file in files:
        if not str(file).endswith(".safetensors"):
            continue
        with safe_open(str(file), "pt") as handle:
            found.tensors.update(handle.keys())
    for name in found.tensors:
        weight, suffix = split_component(name)
        if suffix:
            found.components[weight].add(suffix)
    return found


def is_of_experts(name: str) -> bool:
    """Returns whether a weight is one of the routed experts' ("experts" or "block_sparse_moe")."""
    if "shared_expert" in name:
        return False
    if re.search(r"(?:^|[._])experts?\.", name) or re.search(r"experts?$", name):
        return True
    return name.endswith((".input_linear.weight", ".output_linear.weight"))


def grouped(names: Iterable[str]) -> dict[str, list[int]]:
    """Groups single experts of one projection of a layer: their numbers, by the name of one.

    A stack is a group of its own without numbers.
    """
    groups: dict[tuple[str, ...], dict[int, str]] = defaultdict(dict)
    found: dict[str, list[int]] = {}
    for name in names:
        matched = _ONE_OF_EXPERTS.match(name)
        if matched:
            prefix, projections, number, rest = matched.groups()
            groups[prefix, projections or "", rest][int(number)] = name
        else:
            found[name] = []
    for group in groups.values():
        found[group[min(group)]] = sorted(group)
    return found


def check_components(name: str, names: PackedNames) -> None:
    """Raises CodecError if a weight lacks codes, absmax, code values or its quant state."""
    components = names.components[name]
    missing = [suffix for suffix in ("absmax", "quant_map") if suffix not in components]
    if any(suffix in components for suffix in _NESTED):
        missing += [suffix for suffix in _NESTED if suffix not in components]
    if not any(suffix.startswith(QUANT_STATE_PREFIX) for suffix in components):
        missing.append(f"{QUANT_STATE_PREFIX}nf4")
    if name not in names.tensors:
        raise CodecError(f"{name}: the packed codes are missing; {AGAIN}")
    if missing:
        raise CodecError(f"{name}.{missing[0]} is missing beside its packed codes; {AGAIN}")


def check_numbers(name: str, numbers: Sequence[int], expected: int) -> None:
    """Raises CodecError unless the experts of a projection, one of which is named, are those that
    the config counts.
    """
    for number in range(expected):
        if number not in numbers:
            missing = re.sub(r"\.\d+\.(?!.*\.\d+\.)", f".{number}.", name)
            raise CodecError(
                f"{missing} is missing: the model's config wants experts 0 to {expected - 1}; "
                f"{AGAIN}"
            )
    if numbers[-1] >= expected:
        raise CodecError(
            f"{name}: the files have experts up to {numbers[-1]}, but the model's config wants "
            f"{expected}: take the config.json that was written with these files, or {AGAIN}"
        )
