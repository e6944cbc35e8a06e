"""Which tensors become 4-bit, which are kept, and why: decided from names, shapes and config.json
alone.

A 2-D float `*.weight` is an `nn.Linear`, unless its name, its shape, the tensors beside it, the
config or the family says otherwise. Where the rule is unsure it keeps the tensor and lists its
module as skipped: that always loads.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from nf4conv.choose import skip_list
from nf4conv.choose.evidence import Evidence, Why
from nf4conv.errors import PlanError
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import ModuleNames, module_of
from nf4conv.options import CompareOptions, DequantizeOptions, QuantizeOptions
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo, is_in_4_bits

NOTES: Final = {
    Why.EXPERT: "experts, which transformers 5 cannot load in 4-bit. --moe per-expert packs them; "
    "such a checkpoint "
    "loads in transformers 4, vLLM and Unsloth, and in transformers 5 not at all",
    Why.STACKED_EXPERTS: "experts that are stacked in one tensor, which no loader takes in 4-bit",
    Why.TOWER: "the vision and audio parts. --quantize-towers packs them too",
}
"""What to tell the user when many bytes are kept for a reason."""

Parts = Sequence[
    tuple[str, Source]
]  # the submodels of a diffusers pipeline by name, or one checkpoint without one

FLOAT_DTYPES: Final = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


class PackedMatrix(NamedTuple):
    """One 4-bit weight of the output."""

    name: (
        str  # of the weight in the output, such as "model.layers.0.mlp.experts.3.gate_proj.weight"
    )
    shape: tuple[int, int]  # [out, in], as stored
    transpose: bool = False  # whether the source holds [in, out]
    expert: int | None = None  # which matrix along dimension 0 of a 3-D source
    columns: tuple[int, int] | None = None  # range of the source's columns, before transposing
    rows: tuple[int, int] | None = None  # range of the source's rows, before transposing


class Pack(NamedTuple):
    """A tensor that becomes one 4-bit weight, or several."""

    matrices: tuple[PackedMatrix, ...]
    reason: str


class Keep(NamedTuple):
    """A tensor that is copied."""

    why: Why | str  # one of the reasons that code asks for, or any other, as a text
    keep_dtype: bool = False  # float32 by design, not to be cast to the checkpoint's dtype
    is_linear: bool = (
        False  # whether a loader may hold it in an `nn.Linear`, which the skip list must then name
    )
    detail: str = ""  # what follows the reason; empty if nothing does

    @property
    def reason(self) -> str:
        """The reason as a text."""
        text = self.why.value if isinstance(self.why, Why) else self.why
        return f"{text}: {self.detail}" if self.detail else text


@dataclass(frozen=True, slots=True)
class Selection:
    """The decisions for a whole checkpoint."""

    decisions: dict[str, Pack | Keep]  # for every tensor of the source, in its order
    skip_modules: tuple[str, ...]  # content of llm_int8_skip_modules
    notes: tuple[str, ...] = ()  # what the user should know, a line each
    split: tuple[
        str, ...
    ] = ()  # modules that vLLM fuses, of which some parts are packed and others are not

    @property
    def lines(self) -> tuple[str, ...]:
        """The notes, and a line about what is split."""
        if not self.split:
            return self.notes
        more = f" and {len(self.split) - 1:,} more" if len(self.split) > 1 else ""
        what = f"of {self.split[0]}{more}, which it fuses, some parts are packed and others are not"
        return (*self.notes, f"vLLM cannot load this: {what}")


def select(
    tensors: Sequence[TensorInfo], config: Mapping[str, Any], options: QuantizeOptions
) -> Selection:
    """Decide for every tensor of a checkpoint with this config; the user's wishes add to the rules
    and replace none.

    A PlanError if no skip list can tell the packed modules from the others.
    """
    evidence, names = Evidence.gather(tensors, config), ModuleNames.of(config)
    why_unwanted = _by_wishes(options, names)
    decisions: dict[str, Pack | Keep] = {}
    alike: dict[Hashable, Pack | Keep] = {}
    for tensor in tensors:
        unwanted = why_unwanted(tensor.name)
        kind = (unwanted, evidence.kind_of(tensor))
        decision = alike.get(kind)
        if decision is None:
            decision = alike[kind] = _decide(tensor, evidence, options, unwanted)
        elif isinstance(decision, Pack):  # of one matrix, as all of several experts
            decision = Pack(
                (PackedMatrix(tensor.name, *decision.matrices[0][1:]),), decision.reason
            )
        decisions[tensor.name] = decision
    return with_skip_list(decisions, names, list(_notes(tensors, decisions)))


def demote(
    selection: Selection,
    names: Iterable[str],
    config: Mapping[str, Any],
    why: str = "holds NaN or infinity",
) -> Selection:
    """Keep the named tensors, which were to be packed, and say why.

    A PlanError if one is not to be packed, or becomes several weights, of which loaders expect all.
    """
    decisions = dict(selection.decisions)
    for name in names:
        if [matrix.name for matrix in _matrices(decisions[name])] != [name]:
            raise PlanError(f"{name}: {why}, but it cannot be kept in 16 bits on its own")
        decisions[name] = Keep(why, is_linear=True)
    return with_skip_list(decisions, ModuleNames.of(config), selection.notes)


def with_skip_list(
    decisions: Mapping[str, Pack | Keep],
    names: ModuleNames,
    notes: Sequence[str],
    not_on_disk: Collection[str] = (),
) -> Selection:
    """Complete the decisions for all tensors with the list of modules to skip.

    Where loaders could not tell a packed module from one that they must skip, it is kept too.
    `not_on_disk` are modules in memory that are `nn.Linear` and must be skipped, though no tensor
    is theirs. Errors as `select`.
    """
    decisions = dict(decisions)
    while True:
        packed = {
            matrix.name: name
            for name, decision in decisions.items()
            for matrix in _matrices(decision)
        }
        kept = [
            name
            for name, decision in decisions.items()
            if isinstance(decision, Keep) and decision.is_linear
        ]
        modules = [module_of(name) for name in kept]
        fused, split = skip_list.fused_modules(map(module_of, packed), modules)
        spelled = {
            path: name
            for matrix, name in packed.items()
            for path in names.spellings(module_of(matrix))
        }
        skipped = [
            path for module in (*modules, *fused) for path in names.spellings(module)
        ] + list(not_on_disk)
        skip_modules, mistaken = skip_list.build_skip_modules(spelled, skipped, names.absent)
        if not mistaken:
            skip_modules = skip_list.complete_for_base(skip_modules, spelled, skipped)
            skip_list.check_skip_modules(skip_modules, mistaken, skipped)
            return Selection(decisions, skip_modules, tuple(notes), tuple(split))
        for name in {spelled[path] for path in mistaken}:
            if len(_matrices(decisions[name])) > 1:
                raise PlanError(
                    f"{name}: loaders cannot tell its weights from modules that they must skip"
                )
            decisions[name] = Keep(
                "a loader could not tell its name from that of a skipped module", is_linear=True
            )


def _matrices(decision: Pack | Keep) -> tuple[PackedMatrix, ...]:
    return decision.matrices if isinstance(decision, Pack) else ()


def _decide(
    tensor: TensorInfo, evidence: Evidence, options: QuantizeOptions, unwanted: str | None
) -> Pack | Keep:
    keep_dtype = evidence.is_float32_by_design(tensor)
    if tensor.dtype not in FLOAT_DTYPES:
        return Keep(f"{tensor.dtype} is not a float dtype")
    module = module_of(tensor.name)
    splits_experts = any(family.splits_experts for family in evidence.families)
    if splits_experts and tensor.elements and (matrices := split_experts(tensor)):
        if unwanted:
            raise PlanError(
                f"{tensor.name}: {unwanted}, but transformers loads the experts of this family "
                f"packed only"
            )
        return Pack(matrices, "experts, one nn.Linear each")
    why = evidence.why_not_linear(tensor.name, tensor.shape)
    if why is not None:
        return Keep(why, keep_dtype)
    is_packed = is_in_4_bits(
        tensor
    )  # what a 4-bit source has packed is a linear layer, and stays packed
    why = unwanted or evidence.why_kept(
        module,
        tensor.shape,
        towers=options.quantize_towers or is_packed,
        experts=options.moe == "per-expert" or (is_packed and options.moe is None),
    )
    if why is not None:
        return Keep(why, keep_dtype, is_linear=True)
    is_sure = is_packed or options.include  # which it matches, or it would be unwanted
    doubt = None if is_sure else evidence.why_unsure(module, tensor.shape)
    if doubt is not None:
        return Keep(Why.UNSURE, keep_dtype, is_linear=True, detail=doubt)
    rows, columns = tensor.shape
    if is_transposed(module, evidence.families):
        return Pack(
            (PackedMatrix(tensor.name, (columns, rows), transpose=True),),
            "Conv1D, stored as [in, out]",
        )
    return Pack((PackedMatrix(tensor.name, (rows, columns)),), "nn.Linear")


def split_experts(tensor: TensorInfo) -> tuple[PackedMatrix, ...]:
    """The weights of Llama 4's experts, which transformers loads as one `nn.Linear` each when they
    are packed.

    gate_up_proj is [expert, in, 2 × intermediate], the gate in the first half; down_proj is
    [expert, intermediate, out] (transformers, models/llama4 and quantizers/base.py:
    SequentialLlama4TextExperts). There are one or two for each expert; none when the tensor holds
    no experts.
    """
    prefix, _, leaf = tensor.name.rpartition(".")
    if len(tensor.shape) != 3 or not prefix.endswith("feed_forward.experts"):
        return ()
    experts, rows, columns = tensor.shape
    half = columns // 2
    parts = {
        "gate_up_proj": (("gate_proj", (0, half)), ("up_proj", (half, columns))),
        "down_proj": (("down_proj", (0, columns)),),
    }.get(leaf, ())
    return tuple(
        PackedMatrix(
            f"{prefix}.{index}.{name}.weight", (span[1] - span[0], rows), True, index, span
        )
        for index in range(experts)
        for name, span in parts
    )


def _notes(tensors: Sequence[TensorInfo], decisions: Mapping[str, Pack | Keep]) -> Iterator[str]:
    sizes = [(getattr(decisions[tensor.name], "why", None), tensor.nbytes) for tensor in tensors]
    total = sum(size for _, size in sizes)
    for why, hint in NOTES.items():
        size = sum(size for reason, size in sizes if reason is why)
        if size:
            yield f"{size / 1e9:,.1f} of {total / 1e9:,.1f} GB stay in 16 bits: {hint}"


def _by_wishes(options: QuantizeOptions, names: ModuleNames) -> Callable[[str], str | None]:
    """Why the user does not want a tensor to be packed, by its name; None where it is not known
    that he does not.
    """
    is_skipped = _are_skipped(options.skip_modules, names)

    def why_unwanted(name: str) -> str | None:
        if _matches(name, options.exclude):
            return "excluded by the user"
        if options.skip_modules and is_skipped(name):
            return "in a module that the user skips"
        if options.include and not _matches(name, options.include):
            return "not included by the user"
        return None

    return why_unwanted


def _are_skipped(modules: Sequence[str], names: ModuleNames) -> Callable[[str], bool]:
    """Whether modules that the user skips, as transformers 4 or 5 would, are that of a tensor, by
    its name.
    """
    rules = (skip_list.transformers_4(modules), skip_list.transformers_5(modules))
    return lambda name: any(
        rule(path) for path in names.spellings(module_of(name)) for rule in rules
    )


def is_wanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a name matches one of the globs to include, of which none means all, and none to
    exclude.
    """
    return (not include or _matches(name, include)) and not _matches(name, exclude)


def _matches(name: str, globs: Sequence[str]) -> bool:
    return bool(globs) and any(fnmatchcase(name, glob) for glob in globs)


def unmatched(
    options: QuantizeOptions | DequantizeOptions | CompareOptions, parts: Parts
) -> Iterator[str]:
    """A line for each pattern that matches no tensor, or no module, of any part: a slip of the pen,
    else unnoticed.
    """
    for option, patterns in (("--include", options.include), ("--exclude", options.exclude)):
        for pattern in patterns:
            meant = _meant(pattern, parts)
            if not any(
                fnmatchcase(tensor.name, rest)
                for source, rest in meant
                for tensor in source.tensors
            ):
                yield f"{option} {pattern!r} matches no tensor"
    for name in options.skip_modules if isinstance(options, QuantizeOptions) else ():
        if not any(_has_module(source, rest) for source, rest in _meant(name, parts)):
            yield f"--skip-modules {name!r} matches no module"


def _meant(pattern: str, parts: Parts) -> Iterator[tuple[Source, str]]:
    """The parts that a pattern is about, and the pattern without their name."""
    owner, _, rest = pattern.rpartition("/")
    return ((source, rest) for name, source in parts if not owner or fnmatchcase(name, owner))


def _has_module(source: Source, name: str) -> bool:
    is_named = _are_skipped([name], ModuleNames.of(source.config or {}))
    return any(is_named(tensor.name) for tensor in source.tensors)
