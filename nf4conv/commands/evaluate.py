"""`evaluate`: does the model in 4 bits still say what the original says? Both run through
transformers, in turn.

    text ▸ token ids ▸ windows ▸ SRC: its answers into a temporary file ▸ OUT: its answers against
    them

    causal      log-probabilities of the next token at every position but the last of a window
    seq2seq     the same of the second half of each window, the first being what the encoder reads
    masked      log-probabilities at every seventh position, which is masked; at all if there is no mask token
    encoder     last hidden states, token by token, and their mean over a window

Beside the skeleton of --plan-with this is the only module that imports transformers or
bitsandbytes, when it is called.
"""

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.check.checksums import renew_checksum
from nf4conv.errors import PlanError, SourceError
from nf4conv.models.config import architecture_of
from nf4conv.options import EvaluateOptions, SourceOptions
from nf4conv.output.writer import write_file
from nf4conv.report.results import Evaluation
from nf4conv.sources.source import open_stored

_WINDOWS: Final = {
    "causal": 512,
    "seq2seq": 512,
    "masked": 512,
    "encoder": 128,
}  # tokens, unless the model takes fewer
_TOKENS: Final = 16384
_MOST_BYTES: Final = 2 << 30  # of the temporary file, unless more tokens are asked for
_BATCH_BYTES: Final = 128 << 20  # of the answers to a batch of windows
_MASK_EVERY: Final = 7
_REFUSALS: Final = (
    ValueError,
    RuntimeError,
    OSError,
    ImportError,
    LookupError,
    TypeError,
    AttributeError,
)
"""What transformers raises of models and tokenizers that it cannot use."""


class _Question(NamedTuple):
    """What both models are asked."""

    kind: str  # of model, see above
    loader: Any  # the class that loads them
    ids: torch.Tensor  # [windows, window] int64
    text: str  # where they are from
    mask: int | None  # the id of the mask token, if there is one
    ends: tuple[int, ...]  # those around a window that encoders expect; none, or two
    width: int  # of an answer: the vocabulary, or of an encoder the size of its states
    device: str  # where they run


def evaluate_checkpoint(
    out: str | Path,
    source: str | Path,
    options: EvaluateOptions | None = None,
    device: str = "auto",
    where: SourceOptions | None = None,
    progress: Callable[[float], object] = lambda _: None,
) -> Evaluation:
    """Run the model `out` and the one it was made from on the same text, and compare what they say.

    Args:
        out: a 4-bit checkpoint: a folder, or a name on the Hub.
        source: the same of any model.
        options: what to do.
        device: "auto", "cpu", "cuda" or "cuda:N". On a CPU both run in float32, `out` with its
            weights decoded, because bitsandbytes' own CPU products have faults (docs/quality.md);
            on a GPU as loaders run them.
        where: of what is on the Hub; revision, subfolder and variant are those of `source`.
        progress: called with the share of the work, of 1 in all, that has just been done.

    Raises:
        PlanError: transformers or bitsandbytes is not there, or the architecture or the tokens
            cannot be used.
        SourceError: a model cannot be loaded, or run.
    """
    options, where = options or EvaluateOptions(), where or SourceOptions()
    stored = open_stored(out, replace(where, revision=None, subfolder=None, variant=None))
    path, origin = stored.folder, open_stored(source, where).folder
    if options.card and stored.fetched is not None:
        raise PlanError(f"{out}: --card writes into a folder of yours, and this is on the Hub")
    question = _question(path, stored.config or {}, options, device)
    if options.max_kl is not None and question.kind == "encoder":
        raise PlanError("--max-kl: an encoder gives no probabilities")
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    with tempfile.TemporaryFile() as file, torch.inference_mode():
        for answer, _ in _answers(_load(question, origin, where.variant), question):
            file.write(answer.cpu().numpy().tobytes())
            progress(len(answer) / len(question.ids) / 2)
        file.seek(0)
        for answer, targets in _answers(_load(question, path), question):
            raw = bytearray(file.read(answer.numel() * answer.itemsize))
            before = torch.frombuffer(raw, dtype=torch.float32).view(answer.shape).to(answer.device)
            for name, values in _compare(before, answer, targets, question.kind):
                found[name].append(values.flatten().double().cpu())
            progress(len(answer) / len(question.ids) / 2)
    figures = dict(_figures({name: torch.cat(values).numpy() for name, values in found.items()}))
    passed = options.max_kl is None or figures["kl"] <= options.max_kl
    arithmetic = "float32, weights decoded" if question.device == "cpu" else "as loaded"
    asked = question.kind, question.text, question.ids.numel(), question.device, arithmetic
    evaluation = Evaluation(str(out), str(source), passed, *asked, figures)
    if options.card:
        from nf4conv.report.card import with_evaluation  # importing a reader of YAML takes a moment

        card = path / "README.md"
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        write_file(card, [with_evaluation(text, evaluation).encode()])
        renew_checksum(path, card.name)
    return evaluation


def _question(
    out: Path, config: Mapping[str, Any], options: EvaluateOptions, device: str
) -> _Question:
    kind, loader = _kind(config)
    text_config = next(
        (config[key] for key in ("text_config", "llm_config") if key in config), config
    )
    vocabulary = text_config.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise PlanError(f"{out}: its config does not say how many tokens it knows")
    width = (
        int(text_config.get("hidden_size") or text_config.get("dim") or 1)
        if kind == "encoder"
        else vocabulary
    )
    window = min(
        _WINDOWS[kind],
        *(text_config.get(key) or 512 for key in ("max_position_embeddings", "n_positions")),
    )
    wanted = options.tokens or max(window, min(_TOKENS, _MOST_BYTES // (4 * width)))
    ids, mask, ends = _tokens(out, options.text, wanted)
    text = (
        "pydoc_data.topics, the reference of the Python language"
        if options.text is None
        else options.text.name
    )
    if ids.size < 2 or ids.min() < 0 or ids.max() >= vocabulary:
        raise PlanError(f"{text}: expected at least two token ids from 0 to {vocabulary - 1:,}")
    ends = ends if kind in ("encoder", "masked") else ()
    window = min(window - len(ends), ids.size)
    windows = torch.from_numpy(ids[: ids.size // window * window].reshape(-1, window))
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return _Question(
        kind, loader, windows, text, mask if kind == "masked" else None, ends, width, chosen
    )


def _kind(config: Mapping[str, Any]) -> tuple[str, Any]:
    """What kind of model a config is of, and the class that loads it."""
    try:
        import bitsandbytes  # noqa: F401
        import transformers
        from transformers.models.auto import modeling_auto as auto
    except ImportError as error:
        raise PlanError(
            f"evaluate needs more: pip install 'nf4conv[evaluate]' ({error})"
        ) from error
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # there is one of ours
    name, model_type = architecture_of(config), config.get("model_type")
    tables = {
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "encoder": auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    }
    for kind, table in tables.items():
        if name in table.values() and hasattr(transformers, name):
            return kind, getattr(transformers, name)
    if model_type in auto.MODEL_MAPPING_NAMES and not config.get("is_encoder_decoder"):
        return "encoder", transformers.AutoModel
    raise PlanError(
        f"evaluate cannot run {name or 'a model whose config names no architecture'} ({model_type})"
    )


def _tokens(
    out: Path, text: Path | None, wanted: int
) -> tuple[npt.NDArray[np.int64], int | None, tuple[int, ...]]:
    """Token ids, that of the mask, and those around a window; of ids from a file nothing more is
    known.
    """
    from pydoc_data.topics import topics  # prose that comes with every Python

    import transformers

    try:
        if text is not None and text.suffix == ".npy":
            return np.load(text, allow_pickle=False).reshape(-1)[:wanted].astype(np.int64), None, ()
        content = (
            "\n".join(topics[key] for key in sorted(topics))
            if text is None
            else text.read_text(encoding="utf-8")
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=False)
        ids = tokenizer(content[: 16 * wanted], add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
    except _REFUSALS as error:
        raise PlanError(
            f"{text or out}: no tokens; give their ids, --text ids.npy ({_line(error)})"
        ) from error
    mask, *ends = (getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "cls", "sep"))
    around = tuple(end for end in ends if end is not None)
    return np.array(ids[:wanted], dtype=np.int64), mask, around if len(around) == 2 else ()


def _load(question: _Question, folder: Path, variant: str | None = None) -> Any:
    """A model as loaders load it; on a CPU in float32, with plain layers in the place of those in 4
    bits.
    """
    is_cpu = question.device == "cpu"
    options = {
        "dtype": torch.float32 if is_cpu else "auto",
        "device_map": {"": question.device},
        "variant": variant,
    }
    try:
        model = question.loader.from_pretrained(folder, trust_remote_code=False, **options)
    except _REFUSALS as error:
        raise SourceError(f"{folder}: transformers cannot load it: {_line(error)}") from error
    if is_cpu:
        from bitsandbytes.functional import dequantize_4bit

        for name, module in [*model.named_modules()]:
            if type(module).__name__ == "Linear4bit":
                state = module.weight.quant_state
                plain = torch.nn.Linear(state.shape[1], state.shape[0], device="meta")
                weight = dequantize_4bit(module.weight.data, state).view(state.shape)
                plain.weight, plain.bias = (
                    torch.nn.Parameter(weight, requires_grad=False),
                    module.bias,
                )
                model.set_submodule(name, plain)
        torch.nn.Module.float(model)  # transformers refuses it to models that were quantized
    return model.eval()


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _answers(model: Any, question: _Question) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batch after batch: [windows, positions, width] log-probabilities or states, and the tokens
    they are of.
    """
    step = max(1, min(16, _BATCH_BYTES // (4 * question.width * question.ids.shape[1])))
    for batch in torch.split(question.ids, step):
        try:
            answer, targets = _answer(model, question, batch.to(question.device))
        except _REFUSALS as error:
            raise SourceError(
                f"{model.name_or_path}: transformers cannot run it: {_line(error)}"
            ) from error
        yield (
            answer.float() if question.kind == "encoder" else answer.float().log_softmax(dim=-1),
            targets,
        )


def _answer(
    model: Any, question: _Question, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if question.kind == "causal":
        return model(input_ids=ids).logits[:, :-1], ids[:, 1:]
    if question.kind == "seq2seq":
        read, targets = ids.chunk(2, dim=1)
        first = torch.full_like(targets[:, :1], model.generation_config.decoder_start_token_id or 0)
        shifted = torch.cat((first, targets[:, :-1]), dim=1)
        return model(input_ids=read, decoder_input_ids=shifted).logits, targets
    places, asked = torch.arange(ids.shape[1], device=ids.device), ids.clone()
    if question.mask is not None:
        places = places[_MASK_EVERY // 2 :: _MASK_EVERY]
        asked[:, places] = question.mask
    if question.ends:
        first, last = (torch.full_like(ids[:, :1], end) for end in question.ends)
        asked = torch.cat((first, asked, last), dim=1)
    answer = model(input_ids=asked)
    said = answer.last_hidden_state if question.kind == "encoder" else answer.logits
    return said[:, places + len(question.ends) // 2], ids[:, places]


def _compare(
    before: torch.Tensor, after: torch.Tensor, targets: torch.Tensor, kind: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is found of each position, or window, of a batch."""
    if kind == "encoder":
        yield "cosine", torch.cosine_similarity(before, after, dim=-1)
        yield (
            "cosine_pooled",
            torch.cosine_similarity(before.mean(dim=1), after.mean(dim=1), dim=-1),
        )
        return
    # what the source rules out adds nothing
    yield (
        "kl",
        torch.where(before.isneginf(), 0, before.exp() * (before - after)).sum(
            dim=-1, dtype=torch.float64
        ),
    )
    yield "agreement", before.argmax(dim=-1) == after.argmax(dim=-1)
    yield "perplexity_source", -before.gather(-1, targets[..., None])
    yield "perplexity", -after.gather(-1, targets[..., None])


def _figures(found: Mapping[str, npt.NDArray[np.float64]]) -> Iterator[tuple[str, float]]:
    for name, values in found.items():
        mean = float(values.mean())
        yield name, math.exp(min(mean, 700)) if name.startswith("perplexity") else mean
        if name == "kl":
            yield "kl_median", float(np.median(values))
            yield "kl_99th", float(np.quantile(values, 0.99))
        elif name == "cosine":
            yield "cosine_least", float(values.min())
