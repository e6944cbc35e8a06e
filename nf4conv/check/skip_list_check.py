"""Checks llm_int8_skip_modules: what every loader makes of it, against what is packed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from nf4conv.check.structure import Finding, Structure
from nf4conv.choose.decisions import Keep, Pack
from nf4conv.choose.evidence import Why
from nf4conv.choose.loader_rules import LITERAL, RULES, Rule, is_name
from nf4conv.choose.selection import select
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import TAGS
from nf4conv.models.config import architecture_of
from nf4conv.models.families import families_of, is_transposed
from nf4conv.models.module_names import HEADS, TIED_HEADS, ModuleNames, module_of
from nf4conv.options import QuantizeOptions
from nf4conv.sources.tensors import TensorInfo

_SURELY_LINEAR: Final = (Why.HEAD, Why.FEW_ROWS)
"""Reasons for which a module is kept although loaders do hold it in an `nn.Linear`."""

_EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)
"""Ends of the names of input embeddings."""


class _LinearModule(NamedTuple):
    """Names a module that is not packed and that loaders may hold in an `nn.Linear`."""

    tensor: TensorInfo
    path: str
    is_sure: bool


@dataclass(frozen=True)
class _Loaders:
    """Knows what each loader makes of a list of modules."""

    rules: Mapping[str, Rule]
    module_names: ModuleNames

    def verdicts(self, module: str) -> Iterator[tuple[str, list[bool]]]:
        """Yields each loader, and for each name that it may know a module by, if it skips that.

        `module` is its path on disk.
        """
        paths = self.module_names.spellings(module)
        for loader, is_skipped in self.rules.items():
            yield loader, [is_skipped(path) for path in paths]


def check_skip_list(
    structure: Structure, config: Mapping[str, Any], quantization: Mapping[str, Any]
) -> None:
    """Notes every module that a loader would make 4-bit or not against what is stored."""
    listed = quantization.get("llm_int8_skip_modules")
    is_list_of_names = isinstance(listed, list) and all(isinstance(one, str) for one in listed)
    if listed is not None and not is_list_of_names:
        _note(structure, "llm_int8_skip_modules is not a list of names")
        return
    entries = HEADS if listed is None else listed
    loaders = _Loaders(_rules_for(structure, entries), ModuleNames.of(config))
    structure.findings += _misread_packed(structure, loaders)
    structure.findings += _misread_unpacked(
        structure, config, loaders, is_explicit=listed is not None
    )
    if listed is not None:
        structure.findings += _unnamed_heads(structure, config, loaders)


def _note(structure: Structure, text: str, *, is_fault: bool = True) -> None:
    structure.note("skip list", "config.json", "", text, is_fault=is_fault)


def _finding(tensor: TensorInfo, text: str, is_sure: bool) -> Finding:
    """Says what a loader takes for the wrong kind; surely, unless it depends on how it names it."""
    return Finding("skip list", tensor.file.name, tensor.name, text, is_sure)


def _rules_for(structure: Structure, entries: Sequence[str]) -> dict[str, Rule]:
    """Returns the rule of each loader for a list, and notes entries that are no names.

    transformers 5 would take such entries for patterns. Matching them may never end, so its rules
    are then left out.
    """
    patterns = [entry for entry in entries if entry and not is_name(entry)]
    for pattern in patterns:
        is_fault = False
        what = "a pattern to transformers 5, which is not checked, and a name to other loaders"
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            is_fault = True
            what = f"not a regular expression, for which transformers 5 takes it: {error}"
        text = f"llm_int8_skip_modules: {pattern[:100]!r} is {what}"
        _note(structure, text, is_fault=is_fault)
    loaders = LITERAL if patterns else tuple(RULES)
    return {loader: RULES[loader](entries) for loader in loaders}


def _misread_packed(structure: Structure, loaders: _Loaders) -> Iterator[Finding]:
    """Yields packed modules that a loader would skip, surely only if it would by every name."""
    for weight in structure.weights.values():
        for loader, skipped in loaders.verdicts(module_of(weight.values.name)):
            if any(skipped):
                text = f"is packed, but {loader} would skip it"
                yield _finding(weight.values, text, all(skipped))


def _misread_unpacked(
    structure: Structure, config: Mapping[str, Any], loaders: _Loaders, *, is_explicit: bool
) -> Iterator[Finding]:
    """Yields unpacked modules that a loader would not skip, surely only if it would by no name.

    `is_explicit` is False where the list is missing, so that loaders guess one.
    """
    for module in list(_linear_modules(structure, config)):
        for loader, skipped in loaders.verdicts(module.path):
            if not all(skipped):
                text = f"is not packed, but {loader} would not skip {module.path}"
                is_sure = module.is_sure and is_explicit and not any(skipped)
                yield _finding(module.tensor, text, is_sure)


def _linear_modules(structure: Structure, config: Mapping[str, Any]) -> Iterator[_LinearModule]:
    """Yields everything unpacked that loaders may hold in an `nn.Linear`."""
    original = [*structure.plain.values(), *_before_packing(structure, config)]
    options = QuantizeOptions(moe="packed")
    try:
        decisions = select(original, config, options, packs_towers=True).decisions
    except PlanError as error:
        _note(structure, f"could not be checked: {error}", is_fault=False)
        return
    splits_experts = any(family.splits_experts for family in families_of(config))
    for name, tensor in structure.plain.items():
        decision = decisions[name]
        if isinstance(decision, Pack):
            if len(decision.matrices) > 1 and not splits_experts:
                continue  # a stack of experts is no nn.Linear
            for matrix in decision.matrices:
                yield _LinearModule(tensor, module_of(matrix.name), is_sure=True)
        elif isinstance(decision, Keep) and decision.is_linear:
            yield _LinearModule(tensor, module_of(name), decision.reason in _SURELY_LINEAR)


def _before_packing(structure: Structure, config: Mapping[str, Any]) -> Iterator[TensorInfo]:
    """Yields packed weights with the dtype and shape that they had in the source."""
    families = families_of(config)
    for weight in structure.weights.values():
        shape = weight.shape
        if len(shape) == 2 and is_transposed(module_of(weight.values.name), families):
            rows, columns = shape
            shape = (columns, rows)
        yield weight.values._replace(shape=shape, dtype=TAGS[weight.format.dtype])


def _unnamed_heads(
    structure: Structure, config: Mapping[str, Any], loaders: _Loaders
) -> Iterator[Finding]:
    """Yields an output head that is the embedding, if loaders would make it 4-bit.

    It is not stored, but loaders build it, and they leave it alone only if the list names it.
    """
    if config.get("tie_word_embeddings", True) is not True:
        return
    if not architecture_of(config).endswith("ForCausalLM"):
        return
    heads = list(TIED_HEADS)
    for family in loaders.module_names.families:
        heads += family.heads
    stored = (*structure.plain, *structure.weights)
    if any(module_of(name).endswith(tuple(heads)) for name in stored):
        return
    embeddings = (one for name, one in structure.plain.items() if name.endswith(_EMBEDDINGS))
    embedding = next(embeddings, None)
    if embedding is None:
        return

    # vLLM never quantizes a head
    skipping = {"vLLM"}
    for head in heads:
        skipping |= {loader for loader, skipped in loaders.verdicts(head) if any(skipped)}
    others = [loader for loader in loaders.rules if loader not in skipping]
    if others:
        text = f"is the output head as well, but {', '.join(others)} would not skip lm_head"
        yield _finding(embedding, text, "auto_map" not in config)
