"""`nf4conv verify`: is a 4-bit checkpoint or diffusers pipeline sound, and does it hold what its source holds?"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nf4conv.checkpoint.diffusers_folder import open_diffusers
from nf4conv.commands.output import ignore
from nf4conv.commands.single.verify import VerificationPlan, plan_one, verify_one
from nf4conv.errors import DiffusersFolderError, PlanError
from nf4conv.options import RunOptions, SourceOptions, VerifyOptions
from nf4conv.report.results import VerifyReport
from nf4conv.report.rows import CheckResult, inside


@dataclass(frozen=True)
class DiffusersVerificationPlan:
    """A diffusers pipeline whose headers have been looked at."""

    path: Path  # as it was given
    source: str | Path | None  # what it is compared with, as it was given
    submodels: Mapping[str, VerificationPlan]  # the plan of each, by name

    @property
    def bytes_to_read(self) -> int:
        """Of all submodels."""
        return sum(plan.bytes_to_read for plan in self.submodels.values())


def verify_checkpoint(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
    where: SourceOptions | None = None,
) -> VerifyReport:
    """Verify a 4-bit checkpoint, of ours or of another tool; a diffusers pipeline, too.

    Args:
        path: a folder or a .safetensors file.
        source: what it was made from: a folder, a file, or "org/name" on the Hugging Face Hub; without it only what the
            checkpoint says about itself is verified.
        options: what to require.
        run: how to use the machine.
        progress: told how many more bytes have been read, from any thread.
        where: revision and the like of a source on the Hub.

    Returns:
        One report; of a diffusers pipeline, names have the submodel in front.

    Raises:
        SourceError: there are no weights, or the source cannot be read. Faults of the checkpoint are no errors but
            findings of the report.
        PlanError: the request makes no sense.
    """
    return execute_verification(plan_verification(path, source, options, where), run, progress)


def plan_verification(
    path: str | Path,
    source: str | Path | None = None,
    options: VerifyOptions | None = None,
    where: SourceOptions | None = None,
) -> VerificationPlan | DiffusersVerificationPlan:
    """Look at the headers of a checkpoint, and find out what is to be compared; torch is not imported.

    Arguments and errors as `verify_checkpoint`.
    """
    options = options or VerifyOptions()
    try:
        return plan_one(path, source, options, where)
    except DiffusersFolderError:
        folder = open_diffusers(path)
    origin = None if source is None else open_diffusers(source, where)
    submodels = {}
    for name in folder.submodels:
        place = None if origin is None else origin.submodels.get(name)
        if origin is not None and place is None:
            raise PlanError(f"{source}: lacks the submodel {name} of {path}")
        submodels[name] = plan_one(
            folder.folder / name, None if origin is None else origin.place, options, place, is_submodel=True
        )
    if not any(plan.structure.weights for plan in submodels.values()):
        raise PlanError(f"{path}: no submodel of this diffusers pipeline has a weight in 4 bits")
    return DiffusersVerificationPlan(Path(path), source, submodels)


def execute_verification(
    plan: VerificationPlan | DiffusersVerificationPlan,
    run: RunOptions | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Carry out a plan; arguments, result and errors as `verify_checkpoint`."""
    started = time.perf_counter()
    run, progress = run or RunOptions(), progress or ignore
    if isinstance(plan, VerificationPlan):
        return verify_one(plan, run, progress)
    reports = {name: verify_one(part, run, progress) for name, part in plan.submodels.items()}
    first = next(iter(reports.values()))
    checks: dict[str, CheckResult] = {}
    for report in reports.values():
        for check, found in report.checks.items():
            checks[check] = replace(found, passed=found.passed and checks.get(check, found).passed)
    sizes = {key: sum(report.sizes[key] for report in reports.values()) for key in first.sizes}
    parameters = sum(report.parameters for report in reports.values())
    return replace(
        first,
        path=str(plan.path),
        source=None if plan.source is None else str(plan.source),
        passed=all(report.passed for report in reports.values()),
        checks=checks,
        findings=tuple(
            replace(finding, file=f"{name}/{finding.file}")
            for name, report in reports.items()
            for finding in report.findings
        ),
        weights=tuple(inside(name, row) for name, report in reports.items() for row in report.weights),
        kinds=tuple(inside(name, row) for name, report in reports.items() for row in report.kinds),
        sizes=sizes,
        parameters=parameters,
        bits_per_parameter=8 * sum(sizes.values()) / max(parameters, 1),
        identical=None if plan.source is None else all(report.identical for report in reports.values()),
        seconds=time.perf_counter() - started,
    )
