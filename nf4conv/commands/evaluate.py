"""`nf4conv evaluate`: do models in 4 bits still say what the original says?

All models run through transformers, one after the other:

    text ▸ token ids ▸ windows ▸ the original's answers into a temporary file ▸ the answers of each
    model in 4 bits, compared with them

Only the modules of evaluating/ import transformers or bitsandbytes, when they are called.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from nf4conv.check.checksums import renew_checksum
from nf4conv.commands.evaluating.answers import answers, load
from nf4conv.commands.evaluating.bounds import require_stored
from nf4conv.commands.evaluating.distances import StateDistances, TokenDistances
from nf4conv.commands.evaluating.question import Question, make_question, refuse_adapter
from nf4conv.commands.evaluating.storage import Storage, storages
from nf4conv.declaring import after_one_place, narrowed
from nf4conv.errors import PlanError, SourceError
from nf4conv.options import EvaluateOptions, SourceOptions
from nf4conv.output.writer import write_file, write_result
from nf4conv.report.plot import evaluation_plot
from nf4conv.report.results.contents import Evaluation, Evaluations
from nf4conv.sources.opening import open_stored
from nf4conv.sources.reader import read_small
from nf4conv.sources.source import Source

_PLOT = "evaluation.svg"
_CARD = "README.md"


@after_one_place(EvaluateOptions)
def evaluate(outs: str | Path | Sequence[str | Path], options: EvaluateOptions) -> Evaluations:
    """Runs models in 4 bits and the one they were made from on the same text, and compares them.

    The original runs once, and every model answers the same questions. On a CPU all models run in
    float32, those in 4 bits with their weights decoded, because bitsandbytes' own products on a CPU
    have faults (docs/quality.md). On a GPU they run as loaders run them. Needs
    `pip install 'nf4conv[evaluate]'`.

    Example:
        >>> found = nf4conv.evaluate(["searched", "calibrated"], source="model")
        >>> [one.figures["kl"] for one in found.evaluations]
        [0.0253, 0.0141]

    Args:
        outs: one or several 4-bit checkpoints, each a folder or "org/name" on the Hugging Face Hub.
            The tokenizer is that of the first. Revision, subfolder and variant are those of
            `source`.

    Returns:
        How far the answers of each model are from those of the original, and how large it is.

    Raises:
        OptionError: an option has a value that it cannot have.
        PlanError: transformers or bitsandbytes is not installed, or cannot use the architecture or
            the tokens; or the checkpoints are not of one model.
        SourceError: one of the models cannot be loaded, or cannot be run.
    """
    if isinstance(outs, str | Path):
        outs = [outs]
    source = options.source
    where = narrowed(options, SourceOptions)
    progress = options.progress or (lambda _: None)
    if options.plot is not None and not Path(options.plot).parent.is_dir():
        raise PlanError(f"{options.plot}: its folder does not exist")
    elsewhere = replace(where, revision=None, subfolder=None, variant=None)
    stored = [open_stored(out, elsewhere) for out in outs]
    original = open_stored(source, where)
    _refuse_gguf([original, *stored])
    refuse_adapter(source, original.folder)
    for out, opened in zip(outs, stored, strict=True):
        refuse_adapter(out, opened.folder)
        if options.card:
            _refuse_card(out, opened)
    question = make_question(stored, options, options.device)
    for model in (original, *stored):
        require_stored(question, model)
    if question.kind == "encoder":
        _refuse_probabilities(options)
    folders = [opened.folder for opened in stored]
    figures = _ask_all(question, original.folder, where.variant, folders, progress)
    evaluations = []
    for out, found, room in zip(outs, figures, storages(stored), strict=True):
        evaluations.append(_evaluation(str(out), str(source), question, options, found, room))
    compared = Evaluations(all(one.passed for one in evaluations), tuple(evaluations))
    if options.plot is not None:
        write_result(Path(options.plot), evaluation_plot(compared).encode())
    if options.card:
        for number, folder in enumerate(folders):
            _write_into_card(folder, compared, number)
    return compared


def _evaluation(
    out: str,
    source: str,
    question: Question,
    options: EvaluateOptions,
    figures: Mapping[str, float],
    storage: Storage,
) -> Evaluation:
    """Returns the result for one model in 4 bits.

    Args:
        out: the model, as it was given.
        source: the original, as it was given.
        question: what all models were asked.
        options: the largest divergence that passes, among others.
        figures: how far the answers are from those of the original.
        storage: how much room the model takes.
    """
    return Evaluation(
        out=out,
        source=source,
        passed=options.max_kl is None or figures["kl"] <= options.max_kl,
        kind=question.kind,
        text=question.text,
        tokens=question.ids.numel(),
        device=question.device,
        arithmetic="float32, weights decoded" if question.device == "cpu" else "as loaded",
        figures=figures,
        bytes=storage.bytes,
        bits_per_weight=storage.bits_per_weight,
    )


def _refuse_gguf(models: Sequence[Source]) -> None:
    """Refuses GGUF files, which are no folders that transformers loads."""
    for model in models:
        if model.is_gguf:
            raise SourceError(
                f"{model}: evaluate runs no GGUF file; `nf4conv dequantize` makes a folder of it, "
                f"to give instead"
            )


def _refuse_card(out: str | Path, opened: Source) -> None:
    """Refuses a model whose card cannot be written into."""
    if opened.fetched is not None:
        raise PlanError(f"{out}: --card needs a local folder, and this model is on the Hub")
    _read_card(opened.folder)


def _refuse_probabilities(options: EvaluateOptions) -> None:
    """Refuses options that an encoder has no figures for."""
    for name, value in (("--max-kl", options.max_kl), ("--plot", options.plot)):
        if value is not None:
            raise PlanError(f"{name}: an encoder gives no probabilities")


def _write_into_card(folder: Path, compared: Evaluations, number: int) -> None:
    """Writes an evaluation into the card of one of the models, and a plot beside it.

    Args:
        folder: the folder of the model.
        compared: what was found of all models.
        number: which of them is in the folder, counted from 0.
    """
    from nf4conv.report.card.cards import with_evaluation  # importing YAML takes a moment

    plot = evaluation_plot(compared) if len(compared.evaluations) > 1 else ""
    if plot:
        write_file(folder / _PLOT, [plot.encode()])
        renew_checksum(folder, _PLOT)
    name = _PLOT if plot else ""
    card = with_evaluation(_read_card(folder), compared, number, name)
    write_file(folder / _CARD, [card.encode()])
    renew_checksum(folder, _CARD)


def _read_card(folder: Path) -> str:
    """Reads the model card of a folder, which may have none."""
    path = folder / _CARD
    if not path.exists():
        return ""
    try:
        return read_small(path).decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path}: is no UTF-8 text, so --card cannot write into it; convert it, or remove it"
        ) from error


def _ask_all(
    question: Question,
    original: Path,
    variant: str | None,
    outs: Sequence[Path],
    progress: Callable[[float], object],
) -> list[dict[str, float]]:
    """Asks the original, then each model in 4 bits, and measures how far the answers are apart."""
    share = 1 / len(question.ids) / (1 + len(outs))
    with tempfile.TemporaryFile() as file, torch.inference_mode():
        for answer, _ in answers(load(question, original, variant), question):
            file.write(answer.cpu().numpy().tobytes())
            progress(len(answer) * share)
        return [
            _compare(question, out, file, lambda windows: progress(windows * share)) for out in outs
        ]


def _compare(
    question: Question, out: Path, file: IO[bytes], progress: Callable[[int], object]
) -> dict[str, float]:
    """Asks one model in 4 bits, and compares its answers with those in a file."""
    distances = StateDistances() if question.kind == "encoder" else TokenDistances()
    file.seek(0)
    for answer, targets in answers(load(question, out), question):
        stored = bytearray(file.read(answer.numel() * answer.itemsize))
        before = torch.frombuffer(stored, dtype=torch.float32).view(answer.shape)
        distances.add(before.to(answer.device), answer, targets)
        progress(len(answer))
    return distances.figures()
