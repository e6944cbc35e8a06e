"""Plans the verification of what `dequantize` made: plans the decoding again, and compares.

Neither the plan nor a decoder is written twice: what is compared with OUT is what `dequantize`
would make of the source.
"""

from dataclasses import dataclass
from pathlib import Path

from nf4conv.check.config_check import check_plain_config
from nf4conv.check.copied_files import check_copied_files
from nf4conv.check.decoded.asking import decoding_options, with_other_dtype
from nf4conv.check.decoded.matching import pair_decoded
from nf4conv.check.model_config import check_planned_config
from nf4conv.check.pairing import Pairs
from nf4conv.check.record_check import check_decoded_record, check_origin
from nf4conv.commands.dequantize import plan_checkpoint, plan_submodel
from nf4conv.options import SourceOptions, VerifyOptions
from nf4conv.plan.dequantization import DequantizationPlan, plan_source
from nf4conv.plan.jobs import FLOAT_TAGS
from nf4conv.sources.diffusers.folder import DiffusersFolder
from nf4conv.sources.source import Source
from nf4conv.sources.stored_weights import Structure


@dataclass(frozen=True)
class Decoding:
    """Says what a decoded checkpoint is compared with.

    Attributes:
        source: the checkpoint that is decoded again. None if it was not given.
        pairs: the tensors to compare with those of the source. Empty without a source.
    """

    source: Source | None
    pairs: Pairs


def match_checkpoint(
    structure: Structure,
    source: str | Path | None,
    options: VerifyOptions,
    where: SourceOptions | None,
    *,
    is_folder: bool,
) -> Decoding:
    """Checks headers, record and config of a decoded checkpoint, and finds what to compare.

    Args:
        structure: the checkpoint, which gets the findings.
        source: what it was decoded from. None if that is not given.
        options: what to require.
        where: revision, token and the like of the source.
        is_folder: False for a single file, whose config belongs to a folder.

    Raises:
        DiffusersFolderError: the source is a diffusers pipeline.
        SourceError: the source cannot be read.
        PlanError: the source cannot be decoded as the record says, or adapters are not named.
    """
    _check_alone(structure)
    if source is None:
        return _unproved(structure)
    plan = plan_checkpoint(source, decoding_options(structure, options), where)
    other = with_other_dtype(structure, plan)
    if other is not None:
        plan = plan_source(source, plan.source, other)
    return _match(structure, plan, options, is_folder=is_folder)


def match_submodel(
    structure: Structure, origin: DiffusersFolder | None, name: str, options: VerifyOptions
) -> Decoding:
    """Checks a submodel of a decoded diffusers pipeline, and finds what to compare.

    Args:
        structure: the submodel, which gets the findings.
        origin: the pipeline that it was decoded from. None if that is not given.
        name: the submodel.
        options: what to require.

    Raises:
        SourceError: the submodel of the source cannot be read.
        PlanError: it cannot be decoded as the record says.
    """
    _check_alone(structure)
    if origin is None:
        return _unproved(structure)
    wanted = decoding_options(structure, options)
    plan = plan_submodel(origin, name, wanted, origin.submodels[name])
    return _match(structure, plan, options, is_folder=True)


def _check_alone(structure: Structure) -> None:
    check_decoded_record(structure)
    check_plain_config(structure)


def _unproved(structure: Structure) -> Decoding:
    text = "no value was compared; give --source to decode it again and to compare every bit"
    if structure.record is None:
        text = f"has no weight in 4 bits, and nothing says what it was made from: {text}"
    structure.note("copies", "", "", text, is_fault=False)
    floats = [tensor for tensor in structure.tensors.values() if tensor.dtype in FLOAT_TAGS]
    return Decoding(None, Pairs(alone=tuple(floats)))


def _match(
    structure: Structure, plan: DequantizationPlan, options: VerifyOptions, *, is_folder: bool
) -> Decoding:
    """Pairs a decoded checkpoint with what its source decodes to, and checks its files."""
    pairs = pair_decoded(structure, plan)
    if is_folder:
        check_planned_config(structure, plan.config, exact=options.exact)
        if options.exact:
            check_copied_files(structure, plan.source)
    check_origin(structure, plan.source)
    return Decoding(plan.source, pairs)
