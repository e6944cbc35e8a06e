"""`nf4conv evaluate`: how far models in 4 bits are from the one they were made from, on a text.

A model's answers depend on its kind:

    causal      log-probabilities of the next token at every position but the last of a window
    masked      log-probabilities at every seventh position, which is masked; at all positions if
                there is no mask token
    encoder     last hidden states, compared token by token, and their mean over a window
"""

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from nf4conv.codec.ops import dequantize_4bit
from nf4conv.declaring import after_one_place, narrowed
from nf4conv.errors import PlanError, SourceError, first_line
from nf4conv.models.config import architecture_of
from nf4conv.models.parsing import parse_config
from nf4conv.options import EvaluateOptions, SourceOptions
from nf4conv.report.results import Evaluation, Evaluations
from nf4conv.report.text.progress_bar import Step, begin
from nf4conv.run.checkpoint import ignore
from nf4conv.run.device.on_torch.device import find_device
from nf4conv.sources.files import ADAPTER_CONFIG
from nf4conv.sources.opening import open_stored
from nf4conv.sources.reader import read_ids
from nf4conv.sources.source import Source

_WINDOWS: Final = {"causal": 512, "masked": 512, "encoder": 128}
"""Tokens of a window by the kind of model, unless the model takes fewer."""

_TOKENS: Final = 16384  # that all models read, unless the user asks for another number
_MOST_BYTES: Final = 2 << 30  # of the original's answers, unless the user asks for more tokens
_CHARACTERS: Final = 16  # of text that are read for a token: more than one has on average
_SHIPPED_TEXT: Final = "pydoc_data.topics, the reference of the Python language"

_BATCH_BYTES: Final = 128 << 20  # of the answers to a batch of windows
_LARGEST_BATCH: Final = 16  # windows
_MASK_EVERY: Final = 7  # positions

_NORMAL_95: Final = 1.96  # standard errors on either side of a mean


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
        SourceError: one of the models cannot be loaded or run, or its tokenizer cannot.
    """
    outs = [outs] if isinstance(outs, str | Path) else outs
    where = narrowed(options, SourceOptions)
    elsewhere = replace(where, revision=None, subfolder=None, variant=None)
    stored = [open_stored(out, elsewhere) for out in outs]
    original = open_stored(options.source, where)
    for model in (original, *stored):
        if model.is_gguf or (model.folder / ADAPTER_CONFIG).is_file():
            raise PlanError(
                f"{model}: evaluate runs no GGUF file and no adapter; make a model of it first, by "
                f"`nf4conv dequantize` (of an adapter: of its base, with --lora)"
            )
    question = make_question(stored, options)
    if question.kind == "encoder" and options.max_kl is not None:
        raise PlanError("--max-kl: an encoder gives no probabilities")
    found = _ask_all(question, original, stored, options)
    evaluations = []
    for out, model, figures in zip(outs, stored, found, strict=True):
        passed = options.max_kl is None or figures["kl"] <= options.max_kl
        nbytes = sum(tensor.nbytes for tensor in model.tensors)
        evaluations.append(Evaluation(str(out), passed, figures, nbytes))
    return Evaluations(
        source=str(options.source),
        passed=all(one.passed for one in evaluations),
        kind=question.kind,
        text=question.text,
        tokens=question.ids.numel(),
        device=question.device,
        arithmetic="float32, weights decoded" if question.device == "cpu" else "as loaded",
        evaluations=tuple(evaluations),
    )


def _ask_all(
    question: "Question", original: Source, outs: Sequence[Source], options: EvaluateOptions
) -> list[dict[str, float]]:
    """Asks the original, then each model in 4 bits, and measures how far the answers are apart."""
    progress = options.progress or ignore
    work = question.ids.numel() * (1 + len(outs))
    begin(progress, [Step("evaluating", work, "evaluating", " tokens")])
    window = question.ids.shape[1]
    measure = _state_figures if question.kind == "encoder" else _token_figures

    def answers_of(out: Source) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        file.seek(0)
        for answer, targets in answers(load(question, out), question):
            stored = bytearray(file.read(answer.numel() * answer.itemsize))
            before = torch.frombuffer(stored, dtype=torch.float32).view(answer.shape)
            yield before.to(answer.device), answer, targets
            progress(len(answer) * window)

    with tempfile.TemporaryFile() as file, torch.inference_mode():
        for answer, _ in answers(load(question, original, options.variant), question):
            file.write(answer.cpu().numpy().tobytes())
            progress(len(answer) * window)
        return [measure(answers_of(out)) for out in outs]


# --- what all models are asked ----------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """Holds what all models are asked."""

    kind: str  # "causal", "masked" or "encoder"
    loader: Any  # the class of transformers that loads the models
    ids: torch.Tensor  # token ids, [windows, window] int64
    text: str  # where the tokens come from
    mask: int | None  # the id of the mask token; None if no token is to be masked
    ends: tuple[int, ...]  # ids before and after a window that encoders expect; empty for none
    width: int  # the size of an answer: of the vocabulary, or of an encoder's hidden states
    device: str  # "cpu", "cuda" or "cuda:N"


def make_question(outs: Sequence[Source], options: EvaluateOptions) -> Question:
    """Chooses what to ask, by the config and the tokenizer of the first model in 4 bits."""
    first = outs[0]
    architectures = sorted({architecture_of(out.config or {}) for out in outs})
    if len(architectures) > 1:
        raise PlanError(f"evaluate compares forms of one model, not {', '.join(architectures)}")
    kind, loader = _kind_of_model(first.config or {})
    config = _parsed(first, loader).get_text_config()
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None:
        raise PlanError(f"{first.folder}: its config has no vocab_size, so no token can be checked")
    width = config.hidden_size if kind == "encoder" else vocabulary
    window = min(_WINDOWS[kind], getattr(config, "max_position_embeddings", None) or _TOKENS)
    wanted = options.tokens or max(window, min(_TOKENS, _MOST_BYTES // (4 * width)))
    name = _SHIPPED_TEXT if options.text is None else Path(options.text).name
    mask: int | None = None
    ends: tuple[int, ...] = ()
    if name.endswith(".npy"):
        ids = read_ids(Path(str(options.text))).reshape(-1)[:wanted].astype(np.int64)
    else:
        ids, mask, ends = _tokenized(first.folder, options.text, wanted)
    if kind == "causal":
        ends = ()
    window = min(window - len(ends), ids.size)
    if window < 2 or ids.min() < 0 or ids.max() >= vocabulary:
        raise PlanError(f"{name}: expected at least two token ids from 0 to {vocabulary - 1:,}")
    windows = torch.from_numpy(ids[: ids.size // window * window].reshape(-1, window))
    mask = mask if kind == "masked" else None
    device = str(find_device(options.device))
    return Question(kind, loader, windows, name, mask, ends, width, device)


def _kind_of_model(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the kind of model of a config, and the class of transformers that loads it."""
    try:
        import bitsandbytes  # noqa: F401
        import transformers
        from transformers.models.auto import modeling_auto as auto
    except ImportError as error:
        raise PlanError(
            f"evaluate needs transformers and bitsandbytes: pip install 'nf4conv[evaluate]' "
            f"({error})"
        ) from error
    # nf4conv shows a bar of its own
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    name = architecture_of(config)
    model_type = config.get("model_type")
    tables = [("encoder", auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES)]
    if not config.get("is_encoder_decoder"):
        tables = [
            ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
            ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
            ("causal", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
            *tables,
        ]
    for kind, table in tables:
        if name in table.values() and hasattr(transformers, name):
            return kind, getattr(transformers, name)
    if model_type in auto.MODEL_MAPPING_NAMES and len(tables) > 1:
        return "encoder", transformers.AutoModel
    raise PlanError(f"evaluate cannot run {name or 'a model without a name'} ({model_type})")


def _parsed(model: Source, loader: Any) -> Any:
    """Returns what transformers makes of a model's config.json, without code that it names."""
    from transformers import AutoConfig

    with _in_one_line(f"{model.folder}: transformers cannot read its config.json"):
        return parse_config(model.config or {}, getattr(loader, "config_class", None) or AutoConfig)


@contextmanager
def _in_one_line(message: str) -> Iterator[None]:
    """Raises a SourceError for whatever transformers raises."""
    try:
        yield
    except Exception as error:
        raise SourceError(f"{message}: {first_line(error)}") from error


def _tokenized(
    out: Path, text: str | Path | None, wanted: int
) -> tuple[Any, int | None, tuple[int, ...]]:
    """Returns a text's token ids, the id of the mask token, and those before and after a text."""
    from pydoc_data.topics import topics  # prose that comes with every Python

    import transformers

    characters = _CHARACTERS * wanted
    with _in_one_line(f"{text or out}: cannot be tokenized; give token ids (--text ids.npy)"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            out, trust_remote_code=False, local_files_only=True
        )
        if text is None:
            content = "\n".join(topics[key] for key in sorted(topics))[:characters]
        else:
            with Path(text).open(encoding="utf-8") as file:
                content = file.read(characters)
        encoded = tokenizer(content, add_special_tokens=False, verbose=False)
    ids = np.array(encoded["input_ids"][:wanted], dtype=np.int64)
    first, last, mask = (
        getattr(tokenizer, f"{role}_token_id", None) for role in ("cls", "sep", "mask")
    )
    return ids, mask, () if first is None or last is None else (first, last)


# --- models, and their answers ----------------------------------------------------------------


def load(question: Question, source: Source, variant: str | None = None) -> Any:
    """Loads a model as loaders load it; on a CPU in float32, with its 4-bit layers decoded.

    Code that its config.json names is not fetched.
    """
    is_cpu = question.device == "cpu"
    advice = "`nf4conv dequantize` makes a plain model of what another method quantized"
    with _in_one_line(f"{source.folder}: transformers cannot load it ({advice})"):
        model = question.loader.from_pretrained(
            source.folder,
            config=_parsed(source, question.loader),
            trust_remote_code=False,
            local_files_only=True,
            dtype=torch.float32 if is_cpu else "auto",
            device_map={"": question.device},
            variant=variant,
        )
        if is_cpu:
            _decode_layers(model)
            # transformers refuses model.float() for models that were quantized
            torch.nn.Module.float(model)
    return model.eval()


def _decode_layers(model: Any) -> None:
    """Puts plain layers in the place of those in 4 bits, which bitsandbytes' kernels for CPUs
    decode wrongly if rows are no multiple of the blocksize.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Linear4bit":
            state = module.weight.quant_state
            weight = dequantize_4bit(module.weight.data, state)
            plain = torch.nn.Linear(state.shape[1], state.shape[0], device="meta")
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(name, plain)


def answers(model: Any, question: Question) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Asks a model, batch after batch; yields [windows, positions, width] float32
    log-probabilities or hidden states, and the token ids that they are about.
    """
    bytes_of_window = 4 * question.width * question.ids.shape[1]
    step = max(1, min(_LARGEST_BATCH, _BATCH_BYTES // bytes_of_window))
    for batch in torch.split(question.ids, step):
        with _in_one_line(f"{model.name_or_path}: transformers cannot run it"):
            answer, targets = _answer(model, question, batch.to(question.device))
        answer = answer.float()
        if question.kind != "encoder":
            answer = answer.log_softmax(dim=-1)
        yield answer, targets


def _answer(model: Any, question: Question, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Asks a model about one batch; returns its logits or hidden states, and their tokens."""
    if question.kind == "causal":
        return model(input_ids=ids).logits[:, :-1], ids[:, 1:]
    places = torch.arange(ids.shape[1], device=ids.device)
    asked = ids.clone()
    if question.mask is not None:
        places = places[_MASK_EVERY // 2 :: _MASK_EVERY]
        asked[:, places] = question.mask
    before = 0
    if question.ends:
        first, last = (torch.full_like(ids[:, :1], end) for end in question.ends)
        asked = torch.cat((first, asked, last), dim=1)
        before = 1
    answer = model(input_ids=asked)
    said = answer.last_hidden_state if question.kind == "encoder" else answer.logits
    return said[:, places + before], ids[:, places]


# --- how far answers are apart, and how large models are --------------------------------------


_Answers: TypeAlias = Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Answers of the original and of a model in 4 bits, and the tokens that they are about."""


def _token_figures(pairs: _Answers) -> dict[str, float]:
    """Returns what Evaluation.figures holds of a model that predicts tokens."""
    divergences, agreements, losses, losses_of_source = [], [], [], []
    for before, after, targets in pairs:
        # what the source rules out adds nothing
        terms = torch.where(before.isneginf(), 0, before.exp() * (before - after))
        divergences.append(terms.sum(dim=-1, dtype=torch.float64).cpu())  # in nats
        agreements.append((before.argmax(dim=-1) == after.argmax(dim=-1)).cpu())
        tokens = targets[..., None]
        losses_of_source.append(-before.gather(-1, tokens).cpu().double())
        losses.append(-after.gather(-1, tokens).cpu().double())
    divergence = torch.cat(divergences)  # [windows, positions]
    means = divergence.mean(dim=-1)
    figures = {"kl": float(divergence.mean())}
    if len(means) > 1:
        half = _NORMAL_95 * float(means.std()) / math.sqrt(len(means))
        figures["kl_low"] = figures["kl"] - half
        figures["kl_high"] = figures["kl"] + half
    figures["kl_median"] = float(np.median(divergence))
    figures["kl_99th"] = float(np.quantile(divergence, 0.99))
    figures["agreement"] = float(torch.cat(agreements).double().mean())
    figures["perplexity_source"] = float(torch.cat(losses_of_source).mean().exp())
    figures["perplexity"] = float(torch.cat(losses).mean().exp())
    return figures


def _state_figures(pairs: _Answers) -> dict[str, float]:
    """Returns what Evaluation.figures holds of an encoder."""
    cosines, pooled = [], []
    for before, after, _ in pairs:
        cosines.append(torch.cosine_similarity(before, after, dim=-1).double().cpu())
        means = torch.cosine_similarity(before.mean(dim=1), after.mean(dim=1), dim=-1)
        pooled.append(means.double().cpu())
    cosine = torch.cat(cosines)
    return {
        "cosine": float(cosine.mean()),
        "cosine_least": float(cosine.min()),
        "cosine_pooled": float(torch.cat(pooled).mean()),
    }
