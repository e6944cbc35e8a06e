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
from nf4conv.choices import require_device
from nf4conv.commands.evaluating.answers import answers, load
from nf4conv.commands.evaluating.bounds import require_stored
from nf4conv.commands.evaluating.distances import StateDistances, TokenDistances
from nf4conv.commands.evaluating.question import Question, make_question, refuse_adapter
from nf4conv.commands.evaluating.storage import Storage, storages
from nf4conv.errors import PlanError, SourceError
from nf4conv.options import EvaluateOptions, SourceOptions
from nf4conv.output.writer import write_file, write_result
from nf4conv.report.plot import evaluation_plot
from nf4conv.report.results.contents import Evaluation, Evaluations
from nf4conv.sources.opening import open_stored
from nf4conv.sources.reader import read_small
from nf4conv.sources.source import Source
from nf4conv.wording import named_as_keywords

_PLOT = "evaluation.svg"
_CARD = "README.md"


@named_as_keywords
def evaluate_checkpoint(
    out: str | Path,
    source: str | Path,
    options: EvaluateOptions | None = None,
    device: str = "auto",
    where: SourceOptions | None = None,
    progress: Callable[[float], object] = lambda _: None,
) -> Evaluation:
    """Runs a model in 4 bits and the one it was made from on the same text, and compares them.

    Needs `pip install 'nf4conv[evaluate]'`.

    Args:
        out: the 4-bit checkpoint: a folder, or "org/name" on the Hugging Face Hub.
        source: the original: a folder, or "org/name" on the Hub.
        options: the text, how many tokens of it, and the largest divergence that passes.
        device: "auto", "cpu", "cuda" or "cuda:N". On a CPU both models run in float32, `out` with
            its weights decoded, because bitsandbytes' own products on a CPU have faults
            (docs/quality.md). On a GPU both run as loaders run them.
        where: token and the like for the Hub. Revision, subfolder and variant are those of
            `source`.
        progress: called with the share of the work, from 0 to 1, that was done since the last call.

    Returns:
        How far the answers of both models are apart.

    Raises:
        PlanError: transformers or bitsandbytes is not installed, or cannot use the architecture or
            the tokens.
        SourceError: one of the models cannot be loaded, or cannot be run.

    Example:
        >>> found = nf4conv.evaluate_checkpoint("model-nf4", "model")
        >>> found.figures["kl"]
        0.0312
    """
    return evaluate_checkpoints([out], source, options, device, where, progress).evaluations[0]


@named_as_keywords
def evaluate_checkpoints(
    outs: Sequence[str | Path],
    source: str | Path,
    options: EvaluateOptions | None = None,
    device: str = "auto",
    where: SourceOptions | None = None,
    progress: Callable[[float], object] = lambda _: None,
) -> Evaluations:
    """Compares several forms of a model in 4 bits with the one they were made from, side by side.

    The original runs once, and every form answers the same questions. Needs
    `pip install 'nf4conv[evaluate]'`.

    Args:
        outs: the 4-bit checkpoints, one at least. The tokenizer is that of the first.
        source: the original, as for `evaluate_checkpoint`; so are the other arguments.
        options: the text, how many tokens of it, and the largest divergence that passes.
        device: where all models run.
        where: token and the like for the Hub.
        progress: called with the share of the work, from 0 to 1, that was done since the last call.

    Returns:
        How far the answers of each form are from those of the original, and how large it is.

    Raises:
        PlanError: as for `evaluate_checkpoint`; or the checkpoints are not of one model.
        SourceError: one of the models cannot be loaded, or cannot be run.

    Example:
        >>> found = nf4conv.evaluate_checkpoints(["searched", "calibrated"], "model")
        >>> [one.figures["kl"] for one in found.evaluations]
        [0.0253, 0.0141]
    """
    require_device(device)
    options = options or EvaluateOptions()
    where = where or SourceOptions()
    if options.plot is not None and not options.plot.parent.is_dir():
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
    question = make_question(stored, options, device)
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
        write_result(options.plot, evaluation_plot(compared).encode())
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
