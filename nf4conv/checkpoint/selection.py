"""Which tensors become 4-bit, which are kept, and why: decided from names, shapes and config.json alone.

A 2-D float `*.weight` is an `nn.Linear`, unless its name, its shape, the tensors beside it, the config or the family
says otherwise. Where the rule is unsure it keeps the tensor and lists its module as skipped: that always loads.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from nf4conv.checkpoint.evidence import Evidence
from nf4conv.checkpoint.families import families_of
from nf4conv.checkpoint.header import TensorInfo
from nf4conv.checkpoint.module_names import is_multimodal, spellings
from nf4conv.checkpoint.skip_list import build_skip_modules, check_skip_modules
from nf4conv.errors import PlanError

FLOAT_DTYPES: Final = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """What the user asks for; everything here adds to the rules and replaces none.

    Attributes:
        include: globs on tensor names; when given, only matches are packed. Also packs what the rule is unsure of,
            but nothing that cannot be packed.
        exclude: globs on tensor names; matches are not packed.
        skip_modules: module paths; nothing in them is packed.
        quantize_towers: whether to pack the vision and audio parts of a multimodal model.
        moe: "portable" keeps experts in 16 bits, which loads everywhere; "per-expert" packs experts that are stored
            one by one, which transformers 4 and vLLM load but transformers 5 does not.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    skip_modules: tuple[str, ...] = ()
    quantize_towers: bool = False
    moe: str = "portable"


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One 4-bit weight of the output.

    Attributes:
        name: of the weight in the output, such as "model.layers.0.mlp.experts.3.gate_proj.weight".
        shape: [out, in], as stored.
        transpose: whether the source holds [in, out].
        index: which matrix along dimension 0 of a 3-D source.
        columns: range of the source's columns, before transposing.
        rows: range of the source's rows, before transposing.
    """

    name: str
    shape: tuple[int, int]
    transpose: bool = False
    index: int | None = None
    columns: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Pack:
    """A tensor that becomes one 4-bit weight, or several."""

    matrices: tuple[PackedMatrix, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Keep:
    """A tensor that is copied.

    Attributes:
        reason: why.
        keep_dtype: float32 by design, not to be cast to the checkpoint's dtype.
        is_linear: whether a loader may hold it in an `nn.Linear`, which the skip list must then name.
    """

    reason: str
    keep_dtype: bool = False
    is_linear: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """The decisions for a whole checkpoint.

    Attributes:
        decisions: for every tensor of the source, in its order.
        skip_modules: content of llm_int8_skip_modules.
        notes: what the user should know, a line each.
    """

    decisions: dict[str, Pack | Keep]
    skip_modules: tuple[str, ...]
    notes: tuple[str, ...] = ()


def select(tensors: Sequence[TensorInfo], config: Mapping[str, Any], options: SelectionOptions) -> Selection:
    """Decide for every tensor of a checkpoint.

    Args:
        tensors: of the source.
        config: the content of its config.json.
        options: the user's wishes.

    Raises:
        PlanError: no skip list can tell the packed modules from the others.
    """
    evidence = Evidence.gather(tensors, config)
    decisions = {tensor.name: _decide(tensor, evidence, options) for tensor in tensors}
    return _with_skip_list(decisions, config, ())


def demote(
    selection: Selection, names: Iterable[str], config: Mapping[str, Any], reason: str = "holds NaN or infinity"
) -> Selection:
    """Keep tensors that were to be packed.

    Args:
        selection: what was decided.
        names: of the source tensors to keep after all.
        config: the content of config.json.
        reason: why.

    Raises:
        PlanError: a tensor is not to be packed, or becomes several weights, of which loaders expect all.
    """
    decisions = dict(selection.decisions)
    for name in names:
        decision = decisions.get(name)
        if not isinstance(decision, Pack) or [matrix.name for matrix in decision.matrices] != [name]:
            raise PlanError(f"{name}: {reason}, but it cannot be kept in 16 bits on its own")
        decisions[name] = Keep(reason, is_linear=True)
    return _with_skip_list(decisions, config, selection.notes)


def _with_skip_list(decisions: dict[str, Pack | Keep], config: Mapping[str, Any], notes: tuple[str, ...]) -> Selection:
    families = families_of(config)
    multimodal = is_multimodal(config)

    def spelled(names: Iterable[str]) -> tuple[str, ...]:
        paths = (name.removesuffix(".weight") for name in names)
        return tuple(dict.fromkeys(path for disk in paths for path in spellings(disk, families, multimodal)))

    packed = spelled(
        matrix.name for decision in decisions.values() if isinstance(decision, Pack) for matrix in decision.matrices
    )
    kept = spelled(name for name, decision in decisions.items() if isinstance(decision, Keep) and decision.is_linear)
    skip_modules = build_skip_modules(packed, kept)
    check_skip_modules(skip_modules, packed, kept)
    return Selection(decisions, skip_modules, notes)


def _decide(tensor: TensorInfo, evidence: Evidence, options: SelectionOptions) -> Pack | Keep:
    if tensor.dtype not in FLOAT_DTYPES:
        return Keep(f"{tensor.dtype} is not a float dtype")
    reason = evidence.why_not_a_matrix(tensor)
    if reason is not None:
        return Keep(reason, keep_dtype=evidence.is_float32_by_design(tensor))
    module = tensor.name.removesuffix(".weight")
    reason = evidence.why_not_linear(module, tensor.shape)
    if reason is not None:
        return Keep(reason, keep_dtype=evidence.is_float32_by_design(tensor))
    reason = _unwanted(tensor.name, module, options) or evidence.why_kept(
        module, tensor.shape, towers=options.quantize_towers, experts=options.moe == "per-expert"
    )
    if reason is None and not _matches(tensor.name, options.include):
        reason = evidence.why_unsure(module, tensor.shape)
    if reason is not None:
        return Keep(reason, keep_dtype=evidence.is_float32_by_design(tensor), is_linear=True)
    rows, columns = tensor.shape
    if evidence.is_transposed(module):
        return Pack((PackedMatrix(tensor.name, (columns, rows), transpose=True),), "Conv1D, stored as [in, out]")
    return Pack((PackedMatrix(tensor.name, (rows, columns)),), "nn.Linear")


def _unwanted(name: str, module: str, options: SelectionOptions) -> str | None:
    if _matches(name, options.exclude):
        return "excluded by the user"
    if any(module == skip or module.startswith(f"{skip}.") for skip in options.skip_modules):
        return "in a module that the user skips"
    if options.include and not _matches(name, options.include):
        return "not included by the user"
    return None


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
