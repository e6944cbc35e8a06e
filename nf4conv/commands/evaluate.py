"""`nf4conv evaluate`: does the model in 4 bits still say what the original says?

Both models run through transformers, one after the other:

    text ▸ token ids ▸ windows ▸ the original's answers into a temporary file ▸ the answers of the
    model in 4 bits, compared with them

What is an answer depends on the kind of model:

    causal      log-probabilities of the next token at every position but the last of a window
    seq2seq     log-probabilities of the next token in the second half of each window; the encoder
                reads the first half
    masked      log-probabilities at every seventh position, which is masked; at all positions if
                there is no mask token
    encoder     last hidden states, compared token by token, and their mean over a window

Beside choose/skeleton.py (--plan-with) only this module imports transformers or bitsandbytes, when
it is called.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.check.checksums import renew_checksum
from nf4conv.commands.answers import StateDistances, TokenDistances
from nf4conv.errors import PlanError, SourceError
from nf4conv.models.config import architecture_of
from nf4conv.options import EvaluateOptions, SourceOptions
from nf4conv.output.writer import write_file
from nf4conv.report.results.contents import Evaluation
from nf4conv.sources.opening import open_stored

_WINDOWS: Final = {"causal": 512, "seq2seq": 512, "masked": 512, "encoder": 128}
"""Tokens of a window by the kind of model, unless the model takes fewer."""

_TOKENS: Final = 16384  # that both models read, unless the user asks for another number
_MOST_BYTES: Final = 2 << 30  # of the temporary file, unless the user asks for more tokens
_BATCH_BYTES: Final = 128 << 20  # of the answers to a batch of windows
_LARGEST_BATCH: Final = 16  # windows
_MASK_EVERY: Final = 7  # positions

_REFUSALS: Final = (
    ValueError,
    RuntimeError,
    OSError,
    ImportError,
    LookupError,
    TypeError,
    AttributeError,
)
"""Exceptions that transformers raises for models and tokenizers that it cannot use."""


@dataclass(frozen=True)
class _Question:
    """Holds what both models are asked."""

    # "causal", "seq2seq", "masked" or "encoder"
    kind: str
    # class of transformers that loads both models
    loader: Any
    # token ids, [windows, window] int64
    ids: torch.Tensor
    # where the tokens come from
    text: str
    # id of the mask token; None if no token is to be masked
    mask: int | None
    # ids of the tokens before and after a window that encoders expect; empty if there are none
    ends: tuple[int, ...]
    # size of an answer: that of the vocabulary, or of an encoder's hidden states
    width: int
    # where both models run: "cpu", "cuda" or "cuda:N"
    device: str


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
    options = options or EvaluateOptions()
    where = where or SourceOptions()
    stored = open_stored(out, replace(where, revision=None, subfolder=None, variant=None))
    original = open_stored(source, where).folder
    if options.card and stored.fetched is not None:
        raise PlanError(f"{out}: --card needs a local folder, and this model is on the Hub")
    question = _make_question(stored.folder, stored.config or {}, options, device)
    if options.max_kl is not None and question.kind == "encoder":
        raise PlanError("--max-kl: an encoder gives no probabilities")
    figures = _ask_both(question, original, where.variant, stored.folder, progress)
    passed = options.max_kl is None or figures["kl"] <= options.max_kl
    arithmetic = "float32, weights decoded" if question.device == "cpu" else "as loaded"
    evaluation = Evaluation(
        out=str(out),
        source=str(source),
        passed=passed,
        kind=question.kind,
        text=question.text,
        tokens=question.ids.numel(),
        device=question.device,
        arithmetic=arithmetic,
        figures=figures,
    )
    if options.card:
        _write_into_card(stored.folder, evaluation)
    return evaluation


def _write_into_card(folder: Path, evaluation: Evaluation) -> None:
    from nf4conv.report.card.cards import (
        with_evaluation,  # importing a reader of YAML takes a moment
    )

    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    write_file(card, [with_evaluation(text, evaluation).encode()])
    renew_checksum(folder, card.name)


def _make_question(
    out: Path, config: Mapping[str, Any], options: EvaluateOptions, device: str
) -> _Question:
    """Chooses what to ask, by the config and the tokenizer of the model in 4 bits."""
    kind, loader = _kind_of_model(config)
    text_config = _text_config(config)
    vocabulary = text_config.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise PlanError(f"{out}: its config has no vocab_size, so the tokens cannot be checked")
    width = vocabulary
    if kind == "encoder":
        width = int(text_config.get("hidden_size") or text_config.get("dim") or 1)
    window = _WINDOWS[kind]
    for key in ("max_position_embeddings", "n_positions"):
        window = min(window, text_config.get(key) or 512)
    wanted = options.tokens or max(window, min(_TOKENS, _MOST_BYTES // (4 * width)))
    tokens = _read_tokens(out, options.text, wanted)
    ids = tokens.ids
    text = "pydoc_data.topics, the reference of the Python language"
    if options.text is not None:
        text = options.text.name
    if ids.size < 2 or ids.min() < 0 or ids.max() >= vocabulary:
        raise PlanError(f"{text}: expected at least two token ids from 0 to {vocabulary - 1:,}")
    ends = tokens.ends if kind in ("encoder", "masked") else ()
    window = min(window - len(ends), ids.size)
    whole = ids.size // window * window
    windows = torch.from_numpy(ids[:whole].reshape(-1, window))
    mask = tokens.mask if kind == "masked" else None
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return _Question(
        kind=kind,
        loader=loader,
        ids=windows,
        text=text,
        mask=mask,
        ends=ends,
        width=width,
        device=device,
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config that describes the language model."""
    for key in ("text_config", "llm_config"):
        if key in config:
            found: Mapping[str, Any] = config[key]
            return found
    return config


def _kind_of_model(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the kind of model that a config describes, and the class that loads it."""
    try:
        import bitsandbytes  # noqa: F401
        import transformers
        from transformers.models.auto import modeling_auto as auto
    except ImportError as error:
        raise PlanError(
            f"evaluate needs transformers and bitsandbytes: "
            f"pip install 'nf4conv[evaluate]' ({error})"
        ) from error
    # nf4conv shows a bar of its own
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    name = architecture_of(config)
    model_type = config.get("model_type")
    tables = {
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": {
            **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        },
        "encoder": auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    }
    for kind, table in tables.items():
        if name in table.values() and hasattr(transformers, name):
            return kind, getattr(transformers, name)
    if model_type in auto.MODEL_MAPPING_NAMES and not config.get("is_encoder_decoder"):
        return "encoder", transformers.AutoModel
    described = name or "a model whose config names no architecture"
    raise PlanError(f"evaluate cannot run {described} ({model_type})")


@dataclass(frozen=True)
class _Tokens:
    # int64
    ids: npt.NDArray[np.int64]
    # id of the mask token; None if there is none, or if the ids come from a file
    mask: int | None = None
    # ids of the tokens before and after a text; empty if there are not both
    ends: tuple[int, ...] = ()


def _read_tokens(out: Path, text: Path | None, wanted: int) -> _Tokens:
    """Reads token ids from a file, or makes them of a text with the model's tokenizer."""
    try:
        if text is not None and text.suffix == ".npy":
            ids = np.load(text, allow_pickle=False).reshape(-1)
            return _Tokens(ids[:wanted].astype(np.int64))
        return _tokenize(out, text, wanted)
    except _REFUSALS as error:
        raise PlanError(
            f"{text or out}: cannot be tokenized ({_first_line(error)}); "
            f"give token ids instead: --text ids.npy"
        ) from error


def _tokenize(out: Path, text: Path | None, wanted: int) -> _Tokens:
    from pydoc_data.topics import topics  # prose that comes with every Python

    import transformers

    if text is None:
        content = "\n".join(topics[key] for key in sorted(topics))
    else:
        content = text.read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    # a token is at most 16 characters on average
    encoded = tokenizer(content[: 16 * wanted], add_special_tokens=False, verbose=False)
    ids = np.array(encoded["input_ids"][:wanted], dtype=np.int64)
    first = getattr(tokenizer, "cls_token_id", None)
    last = getattr(tokenizer, "sep_token_id", None)
    ends = () if first is None or last is None else (first, last)
    return _Tokens(ids, getattr(tokenizer, "mask_token_id", None), ends)


def _ask_both(
    question: _Question,
    original: Path,
    variant: str | None,
    out: Path,
    progress: Callable[[float], object],
) -> dict[str, float]:
    """Asks the original, then the model in 4 bits, and measures how far the answers are apart."""
    distances = StateDistances() if question.kind == "encoder" else TokenDistances()
    windows = len(question.ids)
    with tempfile.TemporaryFile() as file, torch.inference_mode():
        for answer, _ in _answers(_load(question, original, variant), question):
            file.write(answer.cpu().numpy().tobytes())
            progress(len(answer) / windows / 2)
        file.seek(0)
        for answer, targets in _answers(_load(question, out), question):
            stored = bytearray(file.read(answer.numel() * answer.itemsize))
            before = torch.frombuffer(stored, dtype=torch.float32).view(answer.shape)
            distances.add(before.to(answer.device), answer, targets)
            progress(len(answer) / windows / 2)
    return distances.figures()


def _load(question: _Question, folder: Path, variant: str | None = None) -> Any:
    """Loads a model as loaders load it; on a CPU in float32, with its 4-bit layers decoded."""
    is_cpu = question.device == "cpu"
    options = {
        "dtype": torch.float32 if is_cpu else "auto",
        "device_map": {"": question.device},
        "variant": variant,
    }
    try:
        model = question.loader.from_pretrained(folder, trust_remote_code=False, **options)
    except _REFUSALS as error:
        raise SourceError(f"{folder}: transformers cannot load it: {_first_line(error)}") from error
    if is_cpu:
        _decode_layers(model)
        # transformers refuses model.float() for models that were quantized
        torch.nn.Module.float(model)
    return model.eval()


def _decode_layers(model: Any) -> None:
    """Puts plain layers in the place of those in 4 bits."""
    from bitsandbytes.functional import dequantize_4bit

    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Linear4bit":
            state = module.weight.quant_state
            weight = dequantize_4bit(module.weight.data, state).view(state.shape)
            plain = torch.nn.Linear(state.shape[1], state.shape[0], device="meta")
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(name, plain)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _answers(model: Any, question: _Question) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Asks a model, batch after batch.

    Yields:
        [windows, positions, width] float32 log-probabilities or hidden states; and the token ids
        that they are about, [windows, positions] int64.
    """
    bytes_of_window = 4 * question.width * question.ids.shape[1]
    step = max(1, min(_LARGEST_BATCH, _BATCH_BYTES // bytes_of_window))
    for batch in torch.split(question.ids, step):
        try:
            answer, targets = _answer(model, question, batch.to(question.device))
        except _REFUSALS as error:
            raise SourceError(
                f"{model.name_or_path}: transformers cannot run it: {_first_line(error)}"
            ) from error
        answer = answer.float()
        if question.kind != "encoder":
            answer = answer.log_softmax(dim=-1)
        yield answer, targets


def _answer(
    model: Any, question: _Question, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Asks a model about one batch; returns its logits or hidden states, and their tokens."""
    if question.kind == "causal":
        return model(input_ids=ids).logits[:, :-1], ids[:, 1:]
    if question.kind == "seq2seq":
        read, targets = ids.chunk(2, dim=1)
        start = model.generation_config.decoder_start_token_id or 0
        first = torch.full_like(targets[:, :1], start)
        shifted = torch.cat((first, targets[:, :-1]), dim=1)
        return model(input_ids=read, decoder_input_ids=shifted).logits, targets
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
