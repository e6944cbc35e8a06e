"""`nf4conv verify`: is a 4-bit checkpoint or diffusers pipeline sound, or a decoded one?

With a source it also checks that the checkpoint holds what its source holds (decoded.py: what it
decodes to).

check      headers, small tensors and config are held against the format
run        with a source, every byte is compared; without one, every scale is looked at
report     every check with its findings, and figures for every weight
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from nf4conv.check.calibrated import check_calibrated
from nf4conv.check.checksums import check_checksums
from nf4conv.check.config_check import check_config, check_exact_config
from nf4conv.check.copied_files import check_copied_files, check_files
from nf4conv.check.decoded.asking import is_decoded, is_plain
from nf4conv.check.model_config import check_model_config, check_model_index
from nf4conv.check.pairing import Pairs, pair
from nf4conv.check.record_check import check_card, check_origin, check_record
from nf4conv.check.structure import read_structure
from nf4conv.commands.decoded import Decoding, match_checkpoint, match_submodel
from nf4conv.declaring import after_one_place, narrowed
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.format.units import size
from nf4conv.options import MachineOptions, SourceOptions, VerifyOptions
from nf4conv.report.results.checks import VerifyReport
from nf4conv.report.verified import join_reports, verification_report
from nf4conv.run.checkpoint import ignore
from nf4conv.run.verifying import verify_values
from nf4conv.sources.adapters.merging import open_merged
from nf4conv.sources.diffusers.folder import DiffusersFolder, open_diffusers
from nf4conv.sources.opening import open_stored
from nf4conv.sources.record import MAKING
from nf4conv.sources.source import Source
from nf4conv.sources.stored_weights import Structure
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
        config: the content of its config.json. Empty if it has none.
        source: the checkpoint that it was made from. None if that was not given.
        pairs: the tensors to compare with those of the source. Empty without a source.
        is_decoded: True if no weight is packed: `dequantize` made the checkpoint, or another tool.
    """

    path: Path
    options: VerifyOptions
    structure: Structure
    config: Mapping[str, Any]
    source: Source | None
    pairs: Pairs
    is_decoded: bool = False

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
    return verify_checkpoint(
        path,
        options.source,
        options,
        narrowed(options, MachineOptions),
        options.progress,
        narrowed(options, SourceOptions),
    )


def verify_checkpoint(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    run: MachineOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> VerifyReport:
    """Verifies a 4-bit checkpoint, or a diffusers pipeline, that nf4conv or another tool made.

    What `dequantize` made is verified, too: the source is decoded again, and every bit must be
    equal.

    Args:
        path: a folder or a .safetensors file.
        source: what it was made from: a folder, a file, or "org/name" on the Hugging Face Hub.
            Without it, only what the checkpoint says about itself is verified.
        options: what to require.
        run: how to use the machine.
        progress: called with the number of bytes that have been read since the last call; from any
            thread.
        where: revision, token and the like of a source on the Hub.

    Returns:
        One report. Faults of the checkpoint are its findings. For a diffusers pipeline, names begin
        with the submodel and a slash.

    Raises:
        SourceError: there are no weights at `path`, or the source cannot be read.
        PlanError: the options make no sense.

    Example:
        >>> report = nf4conv.verify_checkpoint("model-nf4", "model")
        >>> report.passed
        True
    """
    plan = plan_verification(path, source, options, where)
    return execute_verification(plan, run, progress)


def plan_verification(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    where: SourceOptions | None = None,
) -> VerificationPlan | DiffusersVerificationPlan:
    """Looks at the headers of a checkpoint, and finds what to compare, without importing torch.

    Args:
        path: a folder or a .safetensors file.
        source: what it was made from: a folder, a file, or "org/name" on the Hugging Face Hub.
            None to verify only what the checkpoint says about itself.
        options: what to require.
        where: revision, token and the like of a source on the Hub.

    Returns:
        The plan, for `execute_verification`.

    Raises:
        SourceError: there are no weights at `path`, or the source cannot be read.
        PlanError: the options make no sense.

    Example:
        >>> plan = nf4conv.plan_verification("model-nf4", "model")
        >>> plan.bytes_to_read
        3822410752
    """
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
    structure = read_structure(Path(path))
    has_source = source is not None
    if is_decoded(structure, has_source=has_source) or (not has_source and is_plain(structure)):
        is_folder = Path(path).is_dir()
        decoding = match_checkpoint(structure, source, options, where, is_folder=is_folder)
        return _plan_decoded(Path(path), structure, decoding, options)
    config = check_config(structure)
    if not structure.weights and not structure.findings:
        structure.note("components", "", "", f"{path}: has no weight in 4 bits")
    opened = None
    if source is not None:
        opened = open_merged(source, where, options.lora)
    return _plan_pairs(Path(path), structure, config, opened, options)


def _plan_decoded(
    path: Path, structure: Structure, decoding: Decoding, options: VerifyOptions
) -> VerificationPlan:
    return VerificationPlan(
        path, options, structure, {}, decoding.source, decoding.pairs, is_decoded=True
    )


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
    structure = read_structure(path)
    config = check_config(structure) if structure.weights else {}
    plan = _plan_pairs(path, structure, config, source, replace(options, exact=True))
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
    submodels = {}
    for name in folder.submodels:
        if origin is not None and name not in origin.submodels:
            raise PlanError(f"{source}: has no submodel {name}, which {path} has")
        structure = read_structure(folder.folder / name)
        if is_decoded(structure, has_source=False):
            decoding = match_submodel(structure, origin, name, options)
            submodels[name] = _plan_decoded(structure.folder, structure, decoding, options)
            continue
        # a submodel without packed weights is copied as it is: its config says nothing about them
        config = check_config(structure) if structure.weights else {}
        opened = None
        if origin is not None:
            opened = _open_submodel(structure, origin, origin.submodels[name], options)
        plan = _plan_pairs(folder.folder / name, structure, config, opened, options)
        submodels[name] = plan
    plans = submodels.values()
    if not any(plan.structure.weights or plan.is_decoded for plan in plans):
        raise PlanError(
            f"{path}: no submodel of this diffusers pipeline has a weight in 4 bits", path=path
        )
    around = Structure(folder.folder)
    if origin is not None:
        is_ours = any((folder.folder / name / MAKING).is_file() for name in submodels)
        check_model_index(around, origin.index, exact=options.exact and is_ours)
        if options.exact:
            check_files(around, origin.folder, origin.files, is_ours=is_ours)
    return DiffusersVerificationPlan(Path(path), source, submodels, around)


def _plan_pairs(
    path: Path,
    structure: Structure,
    config: Mapping[str, Any],
    source: Source | None,
    options: VerifyOptions,
) -> VerificationPlan:
    """Finds what to compare of one checkpoint with its opened source."""
    if source is None:
        return VerificationPlan(path, options, structure, config, None, Pairs())
    pairs = pair(structure, source)
    if path.is_dir():
        check_model_config(structure, source, exact=options.exact)
    if options.exact:
        check_exact_config(structure, config)
        check_record(structure)
        if path.is_dir():
            check_card(structure)
            check_copied_files(structure, source)
    check_origin(structure, source)
    return VerificationPlan(path, options, structure, config, source, pairs)


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

    Args:
        plan: what `plan_verification` returned. Use it once: the faults of values are added to it.
        run: how to use the machine.
        progress: called with the number of bytes that have been read since the last call; from any
            thread.

    Returns:
        One report. For a diffusers pipeline, names begin with the submodel and a slash.

    Raises:
        SourceError: the checkpoint or its source cannot be read.
        PlanError: the options make no sense on this machine.

    Example:
        >>> plan = nf4conv.plan_verification("model-nf4", "model")
        >>> nf4conv.execute_verification(plan).verdict
        'passed: 196 packed weights, largest relative error 0.0957, ...'
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
    with_checksums = check_checksums(plan.structure, workers)
    source = None if plan.source is None else str(plan.source.folder)
    return verification_report(
        str(plan.path),
        source,
        plan.options,
        plan.structure,
        measured,
        is_decoded=plan.is_decoded,
        with_checksums=with_checksums,
        started=started,
    )
