"""`nf4conv verify`: is a checkpoint or diffusers pipeline sound, and is it what its source gives?

How the two are related, the checkpoint says (check/relation.py):

quantized  headers, small tensors and config are held against the format; with a source, every byte
           is compared with what quantizing it gives, or with what calibration recorded
decoded    the source is decoded again, and every bit compared
nothing    every value is compared, and the user says which difference passes
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from nf4conv.check.config_check import check_config, check_plain_config
from nf4conv.check.copied_files import check_copied_files, check_files
from nf4conv.check.model_config import (
    check_model_config,
    check_model_index,
    check_planned_config,
    is_ours,
)
from nf4conv.check.pairing import Comparison, pair, pair_alike, pair_decoded
from nf4conv.check.record_check import (
    check_calibrated,
    check_origin,
    check_record,
)
from nf4conv.check.relation import Relation, decoding_options, relation_of
from nf4conv.check.structure import Finding, Structure, read_structure
from nf4conv.declaring import after_one_place, narrowed
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.format.dtypes import FLOAT_TAGS
from nf4conv.format.units import size
from nf4conv.options import DequantizeOptions, SourceOptions, VerifyOptions
from nf4conv.plan import dequantization
from nf4conv.plan.writing import WritingPlan
from nf4conv.report.measured import verification_report
from nf4conv.report.results import VerifyReport
from nf4conv.report.text.progress_bar import Step, begin
from nf4conv.run.checkpoint import ignore
from nf4conv.run.verifying import verify_values
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers import DiffusersFolder, open_diffusers
from nf4conv.sources.opening import open_source, open_stored
from nf4conv.sources.source import Source
from nf4conv.system.machine import usable_cores

_log: Final = logging.getLogger(__name__)


@after_one_place(VerifyOptions)
def verify(path: str | Path, options: VerifyOptions) -> VerifyReport:
    """Verifies a 4-bit checkpoint, or a diffusers pipeline, that nf4conv or another tool made.

    Example:
        >>> report = nf4conv.verify("./Llama-3.1-8B-nf4", source="./Llama-3.1-8B", exact=True)
        >>> assert report.passed, report.verdict

    Args:
        path: a folder or a .safetensors file.

    Returns:
        Every check, every fault, and figures for every packed weight.

    Raises:
        SourceError: there are no weights at `path`, or the source cannot be read.
        OptionError: an option has a value that it cannot have.
        PlanError: the options make no sense together.
    """
    started = time.perf_counter()
    if options.source is None and (options.exact or options.lora or options.tolerance is not None):
        raise PlanError("--exact, --lora and --tolerance compare with the source: give --source")
    around: Sequence[Finding] = ()
    try:
        compared = {"": plan_checkpoint(Path(path), options)}
    except DiffusersFolderError:
        compared, around = _plan_pipeline(open_diffusers(path), options)
    work = sum(one.bytes_to_read for one in compared.values())
    planned = time.perf_counter()
    _log.info("checked headers and config in %.1f s; %s to read", planned - started, size(work))
    begin(options.progress, [Step("verifying", work)])
    return _verify_values(str(path), options, compared, around)


def plan_checkpoint(path: Path, options: VerifyOptions) -> Comparison:
    """Looks at the headers of one checkpoint, and finds what to compare, without importing torch.

    Raises:
        DiffusersFolderError: it is a pipeline.
    """
    structure = _look_at(path, has_source=options.source is not None)
    structure.exact = options.exact
    relation = relation_of(structure)
    if options.source is None:
        return _plan_alone(path, structure, relation)
    where = narrowed(options, SourceOptions)
    decode = partial(dequantization.plan_checkpoint, options.source, where=where)
    return _plan_beside(path, structure, relation, options, str(options.source), where, decode)


def _look_at(place: Path, *, has_source: bool) -> Structure:
    """Looks at headers; with a source, at those of safetensors alone, and any file may be compared.

    Raises:
        SourceError: there are no weights that can be verified.
    """
    if place.is_file() and place.suffix != ".safetensors" and has_source:
        return Structure(place.parent)
    has_safetensors = place.is_file() or any(place.glob("*.safetensors*"))
    if place.is_dir() and has_source and not has_safetensors and any(place.glob("*.bin")):
        return Structure(place)
    return read_structure(place)


def _plan_alone(path: Path, structure: Structure, relation: Relation) -> Comparison:
    """Plans to look at a checkpoint without its source.

    Raises:
        PlanError: it does not say what could be verified.
    """
    if relation is Relation.NONE:
        raise PlanError(
            f"{path}: nothing to verify: it has no weight in 4 bits, and nothing says what it was "
            f"made from; --source compares it with another checkpoint",
            path=path,
        )
    check_record(structure)
    if relation is Relation.QUANTIZED:
        check_config(structure)
        if not structure.weights and not any(found.is_fault for found in structure.findings):
            structure.note("components", "", "", f"{path}: has no weight in 4 bits")
        return Comparison(structure, relation)
    check_plain_config(structure)
    text = "no value was compared; give --source to decode it again and to compare every bit"
    structure.note("copies", "", "", text, is_fault=False)
    floats = [tensor for tensor in structure.tensors.values() if tensor.dtype in FLOAT_TAGS]
    return Comparison(structure, relation, alone=floats)


def _plan_beside(
    path: Path,
    structure: Structure,
    relation: Relation,
    options: VerifyOptions,
    place: str,
    where: SourceOptions,
    decode: Callable[[DequantizeOptions], WritingPlan],
) -> Comparison:
    """Plans to compare a checkpoint with its source, by how it says that it was made.

    The source is `where` at a place; `decode` plans to decode it.
    """
    if relation is Relation.NONE:
        if structure.record is None:
            check_record(structure)
        source = open_merged(place, where, options.lora)
        return pair_alike(structure, open_source(path), source)
    if relation is Relation.QUANTIZED:
        return _plan_quantized(path, structure, _open(structure, place, where, options))
    check_record(structure)
    check_plain_config(structure)
    plan = decode(decoding_options(structure, options))
    pairs = pair_decoded(structure, plan)
    if path.is_dir() and pairs.copies:
        check_planned_config(structure, plan.config)
        check_copied_files(structure, plan.source)
    check_origin(structure, plan.source)
    return pairs


def _plan_quantized(path: Path, structure: Structure, source: Source) -> Comparison:
    """Plans to compare a checkpoint with what quantizing its source gives."""
    check_record(structure)
    # a submodel without packed weights is copied as it is: its config says nothing about them
    if structure.weights:
        check_config(structure)
    pairs = pair(structure, source)
    if path.is_dir() and (pairs.weights or pairs.copies):
        check_model_config(structure, source)
        check_copied_files(structure, source)
    check_origin(structure, source)
    return pairs


def _open(structure: Structure, place: str, where: SourceOptions, options: VerifyOptions) -> Source:
    """Opens what a checkpoint was quantized from.

    A submodel that was left as it is, in whatever encoding, is compared as it is stored.
    """
    if not structure.weights and not options.lora:
        stored = open_stored(place, where)
        headers = [
            {(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors}
            for tensors in (stored.tensors, structure.tensors.values())
        ]
        if headers[0] == headers[1]:
            return stored
    return open_merged(place, where, options.lora)


def verify_result(path: Path, source: Source, options: VerifyOptions) -> VerifyReport:
    """Verifies one checkpoint against a source that is open, with its adapters merged."""
    structure = read_structure(path)
    structure.exact = True
    return _verify_values(str(path), options, {"": _plan_quantized(path, structure, source)})


def _plan_pipeline(
    folder: DiffusersFolder, options: VerifyOptions
) -> tuple[dict[str, Comparison], Sequence[Finding]]:
    """Plans the verification of each submodel of a pipeline, and checks the files beside them.

    Returns the plans by submodel, and what is wrong with the files.
    """
    path, source = folder.place, options.source
    where = narrowed(options, SourceOptions)
    origin = None if source is None else open_diffusers(source, where)
    structures = {name: read_structure(folder.folder / name) for name in folder.submodels}
    around = Structure(folder.folder)
    for structure in (around, *structures.values()):
        structure.exact = options.exact
    relations = {name: relation_of(structure) for name, structure in structures.items()}
    are_alike = all(relation is Relation.NONE for relation in relations.values())
    if origin is None and are_alike:
        raise PlanError(
            f"{path}: nothing to verify: no submodel of this diffusers pipeline has a weight in 4 "
            f"bits; --source compares it with another pipeline",
            path=path,
        )
    submodels = {}
    for name, structure in structures.items():
        submodel = folder.folder / name
        relation = relations[name]
        if relation is Relation.NONE and not are_alike:
            relation = Relation.QUANTIZED  # nothing in it is quantized: it was copied as it is
        if origin is not None:
            if name not in origin.submodels:
                raise PlanError(f"{source}: has no submodel {name}, which {path} has")
            where = origin.submodels[name]
            decode = partial(dequantization.plan_submodel, origin.place, where=where)
            submodels[name] = _plan_beside(
                submodel, structure, relation, options, origin.place, where, decode
            )
        elif relation is Relation.QUANTIZED and not structure.weights:
            submodels[name] = Comparison(structure, relation)
        else:
            submodels[name] = _plan_alone(submodel, structure, relation)
    if origin is not None and not are_alike:
        ours = any(is_ours(structure) for structure in structures.values())
        check_model_index(around, origin.index, is_ours=ours)
        if ours:
            check_files(around, origin.folder, origin.files)
    return submodels, around.findings


def _verify_values(
    path: str,
    options: VerifyOptions,
    compared: Mapping[str, Comparison],
    around: Sequence[Finding] = (),
) -> VerifyReport:
    """Verifies the values of a checkpoint, or of submodels by name, and reports all that is wrong.

    `around` is what is wrong with the files beside the submodels.
    """
    started = time.perf_counter()
    measured = []
    for one in compared.values():
        measured.append(verify_values(one, options, options.progress or ignore))
        check_calibrated(one, options.workers or len(usable_cores()))
    return verification_report(path, options, compared, measured, around, started)
