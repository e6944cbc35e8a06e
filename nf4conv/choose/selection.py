"""Decides for every tensor whether it becomes 4-bit, from names, shapes and config.json alone.

A 2-D float `*.weight` is an `nn.Linear`, unless its name, its shape, the tensors beside it, the
config or the family says otherwise. Where the rule is unsure it keeps the tensor and lists its
module as skipped: that always loads.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Final

from nf4conv.choose import skip_list
from nf4conv.choose.decisions import Keep, Pack, PackedMatrix, Selection
from nf4conv.choose.evidence import FEWEST_ROWS, Evidence, Why
from nf4conv.choose.experts import Experts, alike_in_layers, readers_of
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import FLOAT_DTYPES
from nf4conv.format.units import size
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import ModuleNames, module_of
from nf4conv.options import QuantizeOptions
from nf4conv.sources.foreign.bitsandbytes import is_in_4_bits
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo

_HINTS: Final = {
    Why.EXPERT: (
        "experts, which transformers 5 cannot load in 4-bit on its own. --moe packed packs them; "
        "such a checkpoint loads in transformers 5 with nf4conv installed, in transformers 4, vLLM "
        "and Unsloth"
    ),
    Why.STACKED_EXPERTS: (
        "experts that are stacked in one tensor, which transformers 5 cannot load in 4-bit on its "
        "own. --moe packed packs them where nf4conv knows the family; such a checkpoint loads in "
        "transformers 5 with nf4conv installed"
    ),
    Why.TOWER: "the vision and audio parts. --include packs those that it names",
}
"""What to tell the user when many bytes are kept for a reason."""


def select(
    tensors: Sequence[TensorInfo],
    config: Mapping[str, Any],
    options: QuantizeOptions,
    *,
    packs_towers: bool = False,
) -> Selection:
    """Decides for every tensor of a checkpoint.

    Globs of the user add to the rules; they replace none of them.
    """
    evidence = Evidence.gather(tensors, config)
    experts = Experts.gather(tensors, config)
    moe = options.moe
    if moe is None and experts.packs_by_default():
        moe = "packed"
    names = ModuleNames.of(config)
    decisions: dict[str, Pack | Keep] = {}
    known: dict[Hashable, Pack | Keep] = {}
    for tensor in tensors:
        unwanted = why_unwanted(tensor.name, options)
        kind = (unwanted, evidence.kind_of(tensor))
        decision = known.get(kind)
        if decision is None:
            decision = _decide_stack(tensor, evidence, experts, moe, unwanted)
            if decision is None:
                decision = _decide(tensor, evidence, options, moe, unwanted, packs_towers)
            known[kind] = decision
        elif isinstance(decision, Pack):
            # another of many experts, each of which becomes one whole matrix
            first = decision.matrices[0]
            matrix = PackedMatrix(tensor.name, first.shape, first.transpose)
            decision = Pack((matrix,), decision.reason)
        decisions[tensor.name] = decision
    decisions = alike_in_layers(decisions, experts)
    experts.check_layers()
    notes = list(_notes(tensors, decisions))
    matrices = [matrix for each in decisions.values() for matrix in _matrices_of(each)]
    readers = readers_of(matrices, config, options.quant_type)
    if readers is not None:
        notes.append(
            f"{readers.text}; --moe portable keeps them in 16 bits, which loads everywhere"
        )
    return with_skip_list(decisions, names, notes)


def with_skip_list(
    decisions: Mapping[str, Pack | Keep],
    names: ModuleNames,
    notes: Sequence[str],
) -> Selection:
    """Completes the decisions for all tensors with the list of modules to skip.

    Where loaders could not tell a packed module from one that they must skip, it is kept too.
    """
    decisions = dict(decisions)
    each_expert = False
    while True:
        kept = _kept_modules(decisions)
        modules = [module for module, _ in _packed_modules(decisions)]
        each_expert |= any(".experts." in module for module in kept)
        if not each_expert:
            modules = _with_one_expert(modules)
        unpacked, split = skip_list.fused_modules(modules, kept)
        skipped: list[str] = []
        for module in (*kept, *unpacked):
            skipped += names.spellings(module)
        packed = chain.from_iterable(map(names.spellings, modules))
        entries, mistaken = skip_list.build_skip_modules(packed, skipped, names.absent)
        if not mistaken:
            return Selection(decisions, entries, (*notes, *_note_on_split(split)))
        if not each_expert and any(".experts." in module for module in mistaken):
            each_expert = True
            continue
        for module, tensor in list(_packed_modules(decisions)):
            if mistaken.isdisjoint(names.spellings(module)):
                continue
            if len(_matrices_of(decisions[tensor])) > 1:
                raise PlanError(
                    f"{tensor}: loaders cannot tell its weights from modules that they must skip"
                )
            decisions[tensor] = Keep(
                "a loader could not tell its name from that of a skipped module", is_linear=True
            )


def _note_on_split(split: Sequence[str]) -> Iterator[str]:
    """Yields a line if vLLM fuses modules of which only some are packed."""
    if split:
        more = f" and {len(split) - 1:,} more" if len(split) > 1 else ""
        yield (
            f"vLLM cannot load this: of {split[0]}{more}, which it fuses, some parts are packed "
            f"and others are not"
        )


def _packed_modules(decisions: Mapping[str, Pack | Keep]) -> Iterator[tuple[str, str]]:
    """Yields the path of each module that is packed, and the name of the source's tensor."""
    for tensor, decision in decisions.items():
        for matrix in _matrices_of(decision):
            yield module_of(matrix.name), tensor


def _with_one_expert(modules: Sequence[str]) -> list[str]:
    """Leaves out all experts of a layer but the first.

    No name in a skip list tells them apart if none of them is kept. They are most of the modules.
    """
    found: dict[Hashable, str] = {}
    for module in modules:
        layer, _, rest = module.partition(".experts.")
        number, _, projection = rest.partition(".")
        kind = (layer, projection) if number.isdecimal() else module
        found.setdefault(kind, module)
    return list(found.values())


def _kept_modules(decisions: Mapping[str, Pack | Keep]) -> list[str]:
    """Returns the paths of modules that may be `nn.Linear` and are not packed."""
    return [
        module_of(tensor)
        for tensor, decision in decisions.items()
        if isinstance(decision, Keep) and decision.is_linear
    ]


def _matrices_of(decision: Pack | Keep) -> tuple[PackedMatrix, ...]:
    return decision.matrices if isinstance(decision, Pack) else ()


def _decide(
    tensor: TensorInfo,
    evidence: Evidence,
    options: QuantizeOptions,
    moe: str | None,
    unwanted: str | None,
    packs_towers: bool,
) -> Pack | Keep:
    """Decides for one tensor, of which the user may have said why it is unwanted."""
    if tensor.dtype not in FLOAT_DTYPES:
        return Keep(f"{tensor.dtype} is not a float dtype")
    keep_dtype = evidence.is_float32_by_design(tensor)
    why = evidence.why_not_linear(tensor.name, tensor.shape)
    if why is not None:
        return Keep(why, keep_dtype)

    module = module_of(tensor.name)
    # what a 4-bit source has packed is a linear layer, and stays packed
    is_packed = is_in_4_bits(tensor)
    # this tensor is included, if any is: else it would be unwanted
    is_included = bool(options.include)
    why = unwanted or evidence.why_kept(
        module,
        tensor.shape,
        towers=packs_towers or is_packed or is_included,
        experts=moe == "packed" or (is_packed and moe is None),
    )
    if why is not None:
        return Keep(why, keep_dtype, is_linear=True)
    # what the user includes is sure, but "*vision*" includes embeddings of any name
    if not is_packed and not (is_included and not evidence.is_in_tower(module)):
        doubt = evidence.why_unsure(module, tensor.shape)
        if doubt is not None:
            return Keep(f"unsure: {doubt}", keep_dtype, is_linear=True)

    rows, columns = tensor.shape
    if is_transposed(module, evidence.families):
        matrix = PackedMatrix(tensor.name, (columns, rows), transpose=True)
        return Pack((matrix,), "Conv1D, stored as [in, out]")
    return Pack((PackedMatrix(tensor.name, (rows, columns)),), "nn.Linear")


def _decide_stack(
    tensor: TensorInfo, evidence: Evidence, experts: Experts, moe: str | None, unwanted: str | None
) -> Pack | Keep | None:
    """Decides for a tensor that stacks experts; None for one that the other rules decide about."""
    if tensor.name not in experts.stacks or not tensor.elements:
        return None
    if any(family.splits_experts for family in evidence.families):
        if unwanted:
            raise PlanError(
                f"{tensor.name}: {unwanted}, but transformers loads the experts of this family "
                f"packed only"
            )
        return Pack(experts.matrices_of(tensor), "experts, one nn.Linear each")
    stays = moe is None and is_in_4_bits(tensor)
    if moe != "packed" and not stays:
        return Keep(Why.STACKED_EXPERTS, evidence.is_float32_by_design(tensor))
    if unwanted:
        return Keep(unwanted)
    matrices = experts.matrices_of(tensor)
    if stays:
        matrix = PackedMatrix(tensor.name, tensor.shape)
        return Pack((matrix,), "experts, as the stack that they are")
    if matrices[0].shape[0] < FEWEST_ROWS:
        return Keep(Why.FEW_ROWS)
    return Pack(matrices, "experts, taken out of their stack")


def _notes(tensors: Sequence[TensorInfo], decisions: Mapping[str, Pack | Keep]) -> Iterator[str]:
    """Yields a line for each reason that an option could change, if bytes are kept for it."""
    kept: Counter[str] = Counter()
    for tensor in tensors:
        decision = decisions[tensor.name]
        if isinstance(decision, Keep) and decision.reason in _HINTS:
            kept[decision.reason] += tensor.nbytes
    if not kept:
        return
    total = sum(tensor.nbytes for tensor in tensors)
    for why, hint in _HINTS.items():
        if kept[why]:
            yield f"{size(kept[why])} of {size(total)} stay in 16 bits: {hint}"


# --- what the user asked for by names: --include and --exclude ------------------------------------


def why_unwanted(name: str, options: QuantizeOptions) -> str | None:
    """Returns why the user does not want a tensor to be packed; None if nothing is against it."""
    if _matches(name, options.exclude):
        return "excluded by the user"
    if options.include and not _matches(name, options.include):
        return "not included by the user"
    return None


def _matches(name: str, globs: Sequence[str]) -> bool:
    """Returns True if a name matches one of the globs."""
    # most runs have no globs, and a checkpoint may have 100,000 tensors
    return bool(globs) and any(fnmatchcase(name, glob) for glob in globs)


def unmatched(options: QuantizeOptions, sources: Sequence[tuple[str, Source]]) -> Iterator[str]:
    """Yields a line for each pattern of the user that matches nothing, which is likely a typo.

    A pattern such as "transformer/*.attn.*" is about one submodel of a diffusers pipeline, which is
    named beside its source; a checkpoint of its own has the name "".
    """
    for option, patterns in (("--include", options.include), ("--exclude", options.exclude)):
        for pattern in patterns:
            if not _matches_any_tensor(pattern, sources):
                yield f"{option} {pattern!r} matches no tensor"


def _matches_any_tensor(pattern: str, sources: Sequence[tuple[str, Source]]) -> bool:
    owner, _, glob = pattern.rpartition("/")
    for name, source in sources:
        if owner and not fnmatchcase(name, owner):
            continue
        if any(fnmatchcase(tensor.name, glob) for tensor in source.tensors):
            return True
    return False
