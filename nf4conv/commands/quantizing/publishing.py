"""Uploads a result: opens its repository before the run, and commits after it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nf4conv.options import PushOptions, RunOptions
from nf4conv.output.writer import write_file
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.report.loading import Loading
from nf4conv.report.results.runs import QuantizeReport

if TYPE_CHECKING:
    from nf4conv.output.push import Push


def open_push(push: PushOptions | None, run: RunOptions) -> "AbstractContextManager[Push | None]":
    """Opens the repository to upload to before anything is computed.

    So whatever is wrong with it is known at once.
    """
    if push is None or push.push_to_hub is None:
        return nullcontext()
    from nf4conv.output.push import Push  # importing huggingface_hub takes a while

    return Push(
        push.push_to_hub,
        token=push.token,
        public=push.public,
        overwrite=run.overwrite,
    )


def pushed(
    report: QuantizeReport,
    repository: "Push",
    out: Path,
    plan: QuantizationPlan,
    loading: Loading | None,
) -> QuantizeReport:
    """Commits what has been uploaded, and adds the address to the report.

    Args:
        report: what was done.
        repository: where the result goes.
        out: the result. If an earlier run made it, its card does not name the repository yet.
        plan: the plan, or that of a submodel.
        loading: how the result is loaded. None if nothing says how.
    """
    if loading is not None and report.already_complete:
        _name_repository(out, loading, repository.repo)
    message = f"Quantize to {plan.output.format.quant_type} with nf4conv"
    report = replace(report, pushed=repository.commit(out, message), push="")
    if loading is None:
        return report
    return replace(report, loading=loading.code(repository.repo))


def _name_repository(out: Path, loading: Loading, repo: str) -> None:
    """Writes the repository's name into the code of a card that was made without it."""
    from nf4conv.report.card import with_repository  # importing YAML takes a moment

    card = out / "README.md"
    if not card.is_file():
        return
    before = card.read_text(encoding="utf-8")
    after = with_repository(before, loading, repo)
    if after != before:
        write_file(card, [after.encode()])
