"""`nf4conv verify`: is a checkpoint or diffusers pipeline sound, and is it what its source gives?

How the two are related, the checkpoint says (check/relation.py):

quantized  headers, small tensors and config are held against the format; with a source, every byte
           is compared with what quantizing it gives, or with what calibration recorded
decoded    the source is decoded again, and every bit compared
nothing    every value is compared, and the user says which difference passes
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from nf4conv.check.calibrated import check_calibrated
from nf4conv.check.comparing import pair_alike
from nf4conv.check.config_check import check_config, check_plain_config
from nf4conv.check.copied_files import check_copied_files, check_files
from nf4conv.check.model_config import (
    check_model_config,
    check_model_index,
    check_planned_config,
    is_ours,
)
from nf4conv.check.pairing import Pairs, pair, pair_decoded
from nf4conv.check.record_check import check_card, check_origin, check_record
from nf4conv.check.relation import Relation, decoding_options, relation_of
from nf4conv.check.structure import Structure, read_structure
from nf4conv.commands import dequantize
from nf4conv.declaring import after_one_place, narrowed
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.format.dtypes import FLOAT_TAGS
from nf4conv.format.units import size
from nf4conv.options import MachineOptions, SourceOptions, VerifyOptions
from nf4conv.plan.dequantization import DequantizationPlan
from nf4conv.report.results import VerifyReport
from nf4conv.report.verified import join_reports, verification_report
from nf4conv.run.checkpoint import ignore
from nf4conv.run.verifying import verify_values
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers import DiffusersFolder, open_diffusers
from nf4conv.sources.opening import open_readable, open_source, open_stored
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo
from nf4conv.system.cores import usable_cores

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerificationPlan:
    """A checkpoint whose headers have been looked at.

    Attributes:
        path: the checkpoint, as it was given.
        options: what was asked for.
        structure: the checkpoint, with what is wrong with it so far.
        source: the checkpoint that it is compared with. None if that was not given.
        pairs: the tensors to compare with those of the source. Empty without a source.
        relation: how it says that it was made.
    """

    path: Path
    options: VerifyOptions
    structure: Structure
    source: Source | None
    pairs: Pairs
    relation: Relation

    @property
    def bytes_to_read(self) -> int:
        """The bytes of all scales, and with a source those of everything that is compared."""
        count = 0
        for weight in self.structure.weights.values():
            count += weight.nbytes - weight.values.nbytes
        for weight, job in self.pairs.weights:
            count += weight.nbytes + job.source_bytes
        for stored, original in self.pairs.copies:
            count += stored.nbytes + original.nbytes
        for original, tensor, _ in self.pairs.alike:
            count += original.nbytes + tensor.nbytes
        count += sum(tensor.nbytes for tensor in self.pairs.alone)
        return count


@dataclass(frozen=True)
class DiffusersVerificationPlan:
    """A diffusers pipeline whose headers have been looked at.

    Attributes:
        path: the pipeline, as it was given.
        source: the pipeline that it is compared with, as it was given. None if there is none.
        submodels: the plan of each submodel, by its name.
        around: the files beside the submodels, with what is wrong with them.
    """

    path: Path
    source: str | Path | None
    submodels: Mapping[str, VerificationPlan]
    around: Structure

    @property
    def bytes_to_read(self) -> int:
        """The bytes that are read of all submodels."""
        return sum(plan.bytes_to_read for plan in self.submodels.values())


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
    plan = plan_verification(path, options.source, options, narrowed(options, SourceOptions))
    return execute_verification(plan, narrowed(options, MachineOptions), options.progress)


def plan_verification(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    where: SourceOptions | None = None,
) -> VerificationPlan | DiffusersVerificationPlan:
    """Looks at the headers of a checkpoint, and finds what to compare, without importing torch."""
    started = time.perf_counter()
    options = options or VerifyOptions()
    _check_options(source, options)
    plan: VerificationPlan | DiffusersVerificationPlan
    try:
        plan = _plan_checkpoint(path, source, options, where)
    except DiffusersFolderError:
        plan = _plan_pipeline(open_diffusers(path), path, source, options, where)
    seconds = time.perf_counter() - started
    _log.info("checked headers and config in %.1f s; %s to read", seconds, size(plan.bytes_to_read))
    return plan


def _check_options(source: str | Path | None, options: VerifyOptions) -> None:
    needs_source = options.exact or options.lora or options.tolerance is not None
    if source is None and needs_source:
        raise PlanError("--exact, --lora and --tolerance compare with the source: give --source")


def _plan_checkpoint(
    path: str | Path,
    source: str | Path | None,
    options: VerifyOptions,
    where: SourceOptions | None,
) -> VerificationPlan:
    """Plans the verification of one checkpoint; raises DiffusersFolderError for a pipeline."""
    place = Path(path)
    structure = _look_at(place, has_source=source is not None)
    relation = relation_of(structure)
    if source is None:
        return _plan_alone(place, structure, relation, options)
    if relation is Relation.DECODED:
        plan = dequantize.plan_checkpoint(source, decoding_options(structure, options), where)
        return _plan_decoded(place, structure, plan, options)
    opened = open_merged(source, where, options.lora)
    if relation is Relation.NONE:
        return _plan_alike(place, structure, open_source(path), opened, options)
    return _plan_quantized(place, structure, opened, options)


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


def _plan_alone(
    path: Path, structure: Structure, relation: Relation, options: VerifyOptions
) -> VerificationPlan:
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
    check_record(structure, exact=options.exact)
    if relation is Relation.QUANTIZED:
        check_config(structure)
        check_card(structure)
        if not structure.weights and not any(found.is_fault for found in structure.findings):
            structure.note("components", "", "", f"{path}: has no weight in 4 bits")
        return VerificationPlan(path, options, structure, None, Pairs(), relation)
    check_plain_config(structure)
    text = "no value was compared; give --source to decode it again and to compare every bit"
    structure.note("copies", "", "", text, is_fault=False)
    floats = [tensor for tensor in structure.tensors.values() if tensor.dtype in FLOAT_TAGS]
    return VerificationPlan(path, options, structure, None, Pairs(alone=tuple(floats)), relation)


def _plan_quantized(
    path: Path, structure: Structure, source: Source, options: VerifyOptions
) -> VerificationPlan:
    """Plans to compare a checkpoint with what quantizing its source gives."""
    check_record(structure, exact=options.exact)
    # a submodel without packed weights is copied as it is: its config says nothing about them
    if structure.weights:
        check_config(structure)
    pairs = pair(structure, source)
    if path.is_dir() and (pairs.weights or pairs.copies):
        check_card(structure)
        check_model_config(structure, source, exact=options.exact)
        check_copied_files(
            structure, source, is_ours=structure.record is not None, exact=options.exact
        )
    check_origin(structure, source)
    return VerificationPlan(path, options, structure, source, pairs, Relation.QUANTIZED)


def _plan_decoded(
    path: Path, structure: Structure, plan: DequantizationPlan, options: VerifyOptions
) -> VerificationPlan:
    """Plans to compare a checkpoint with what decoding its source gives, as a plan says."""
    check_record(structure, exact=options.exact)
    check_plain_config(structure)
    pairs = pair_decoded(structure, plan)
    if path.is_dir() and pairs.copies:
        check_planned_config(structure, plan.config, exact=options.exact)
        check_copied_files(structure, plan.source, is_ours=True, exact=options.exact)
    check_origin(structure, plan.source)
    return VerificationPlan(path, options, structure, plan.source, pairs, Relation.DECODED)


def _plan_alike(
    path: Path, structure: Structure, out: Source, source: Source, options: VerifyOptions
) -> VerificationPlan:
    """Plans to compare the values of two checkpoints."""
    if structure.record is None:
        check_record(structure, exact=options.exact)
    pairs = pair_alike(structure, out, source)
    return VerificationPlan(path, options, structure, source, pairs, Relation.NONE)


def verify_result(
    path: Path,
    source: Source,
    options: VerifyOptions,
    run: MachineOptions,
    progress: Callable[[int], None],
) -> VerifyReport:
    """Verifies one checkpoint against a source that is open, with its adapters merged.

    Args:
        path: the folder of the checkpoint.
        source: what it was made from.
        options: what to require.
        run: how to use the machine.
        progress: called with the number of bytes that have been read since the last call.

    Raises:
        SourceError: the checkpoint or its source cannot be read.
    """
    plan = _plan_quantized(path, read_structure(path), source, replace(options, exact=True))
    return _verify_checkpoint(replace(plan, options=options), run, progress)


def _plan_pipeline(
    folder: DiffusersFolder,
    path: str | Path,
    source: str | Path | None,
    options: VerifyOptions,
    where: SourceOptions | None,
) -> DiffusersVerificationPlan:
    """Plans the verification of each submodel of a pipeline, and checks the files beside them.

    Args:
        folder: the pipeline.
        path: the pipeline, as it was given.
        source: the pipeline that it was made from, as it was given. None if that was not given.
        options: what to require.
        where: revision, token and the like of a source on the Hub.
    """
    origin = None if source is None else open_diffusers(source, where)
    structures = {name: read_structure(folder.folder / name) for name in folder.submodels}
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
        place = folder.folder / name
        if origin is None:
            # a submodel in which nothing is quantized was copied as it is
            relation = relations[name]
            if relation is not Relation.DECODED and not structure.weights:
                plan = VerificationPlan(
                    place, options, structure, None, Pairs(), Relation.QUANTIZED
                )
            else:
                plan = _plan_alone(place, structure, relation, options)
        elif name not in origin.submodels:
            raise PlanError(f"{source}: has no submodel {name}, which {path} has")
        elif are_alike:
            theirs = open_readable(origin.place, origin.submodels[name])
            mine = open_readable(folder.place, folder.submodels[name])
            plan = _plan_alike(place, structure, mine, theirs, options)
        elif relations[name] is Relation.DECODED:
            wanted = decoding_options(structure, options)
            decoding = dequantize.plan_submodel(origin, name, wanted, origin.submodels[name])
            plan = _plan_decoded(place, structure, decoding, options)
        else:
            opened = _open_submodel(structure, origin, origin.submodels[name], options)
            plan = _plan_quantized(place, structure, opened, options)
        submodels[name] = plan
    around = Structure(folder.folder)
    if origin is not None and not are_alike:
        ours = any(is_ours(structure) for structure in structures.values())
        check_model_index(around, origin.index, is_ours=ours, exact=options.exact)
        if ours:
            check_files(around, origin.folder, origin.files, exact=options.exact)
    return DiffusersVerificationPlan(Path(path), source, submodels, around)


def _open_submodel(
    structure: Structure, origin: DiffusersFolder, where: SourceOptions, options: VerifyOptions
) -> Source:
    """Opens the submodel that one of a diffusers pipeline was made from.

    One that was left as it is, in whatever encoding, is compared as it is stored.
    """
    if not structure.weights and not options.lora:
        stored = open_stored(origin.place, where)
        if _headers_of(stored.tensors) == _headers_of(structure.tensors.values()):
            return stored
    return open_merged(origin.place, where, options.lora)


def _headers_of(tensors: Iterable[TensorInfo]) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors}


def execute_verification(
    plan: VerificationPlan | DiffusersVerificationPlan,
    run: MachineOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Verifies the values of a planned checkpoint, and reports everything that is wrong with it.

    A plan is used once: the faults of values are added to it.
    """
    started = time.perf_counter()
    run = run or MachineOptions()
    progress = progress or ignore
    if isinstance(plan, VerificationPlan):
        return _verify_checkpoint(plan, run, progress)
    reports = {}
    for name, part in plan.submodels.items():
        reports[name] = _verify_checkpoint(part, run, progress)
    source = None if plan.source is None else str(plan.source)
    return join_reports(str(plan.path), source, reports, plan.around.findings, started)


def _verify_checkpoint(
    plan: VerificationPlan, run: MachineOptions, progress: Callable[[int], None]
) -> VerifyReport:
    """Verifies the values of one checkpoint."""
    started = time.perf_counter()
    measured = verify_values(plan.structure.weights, plan.pairs, run, progress, plan.source)
    workers = run.workers or len(usable_cores())
    check_calibrated(plan.structure, plan.pairs, workers)
    source = None if plan.source is None else str(plan.source.folder)
    return verification_report(
        str(plan.path),
        source,
        plan.options,
        plan.structure,
        measured,
        relation=plan.relation,
        started=started,
    )
