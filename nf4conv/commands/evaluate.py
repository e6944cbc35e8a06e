"""`nf4conv evaluate`: how far models in 4 bits are from the one they were made from, on a text.

It looks for faults of text and models first. Importing transformers and loading a model come later,
because both take long. A model's answers depend on its kind:

    causal      log-probabilities of the next token at every position but the last of a window
    masked      log-probabilities at every seventh position, which is masked; at all positions if
                there is no mask token
    encoder     last hidden states, compared token by token, and their mean over a window
"""

import importlib.util
import math
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from nf4conv.check.structure import structure_of
from nf4conv.codec.ops import dequantize_4bit
from nf4conv.declaring import after_one_place, narrowed
from nf4conv.errors import PlanError, SourceError, first_line
from nf4conv.models.config import architecture_of, without_quantization
from nf4conv.models.parsing import excess_of, parse_config
from nf4conv.options import EvaluateOptions, SourceOptions
from nf4conv.report.results import Evaluation, Evaluations
from nf4conv.report.text.progress_bar import Step, begin
from nf4conv.run.device.on_torch.device import find_device
from nf4conv.sources.files import ADAPTER_CONFIG, has_tokenizer
from nf4conv.sources.opening import open_stored
from nf4conv.sources.reader import read_ids, read_json
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

_VALUES_OF_A_BYTE: Final = 4  # twice as many as in 4 bits; layers may share weights
_ALWAYS_ALLOWED: Final = 2**26  # values: what is computed, and not stored

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
        SourceError: one of the models cannot be loaded, or cannot be run.
    """
    outs = [outs] if isinstance(outs, str | Path) else outs
    where = narrowed(options, SourceOptions)
    elsewhere = replace(where, revision=None, subfolder=None, variant=None)
    stored = [open_stored(out, elsewhere) for out in outs]
    original = open_stored(options.source, where)
    for place, opened in zip((options.source, *outs), (original, *stored), strict=True):
        _require_folder_of_model(place, opened)
    question = make_question(stored, options)
    for model in (original, *stored):
        _require_stored(question, model)
    if question.kind == "encoder" and options.max_kl is not None:
        raise PlanError("--max-kl: an encoder gives no probabilities")
    found = _ask_all(question, original, stored, options)
    evaluations = []
    for out, model, figures, bits in zip(
        outs, stored, found, _bits_per_weight(stored), strict=True
    ):
        passed = options.max_kl is None or figures["kl"] <= options.max_kl
        nbytes = sum(tensor.nbytes for tensor in model.tensors)
        evaluations.append(Evaluation(str(out), passed, figures, nbytes, bits))
    return Evaluations(
        source=str(options.source),
        kind=question.kind,
        text=question.text,
        tokens=question.ids.numel(),
        device=question.device,
        arithmetic="float32, weights decoded" if question.device == "cpu" else "as loaded",
        evaluations=tuple(evaluations),
    )


def _require_folder_of_model(place: str | Path, opened: Source) -> None:
    """Refuses GGUF files, and adapters, of which transformers would load the base."""
    if opened.is_gguf:
        raise SourceError(
            f"{opened}: evaluate runs no GGUF file; `nf4conv dequantize` makes a folder of it, "
            f"to give instead"
        )
    path = opened.folder / ADAPTER_CONFIG
    if path.is_file():
        base = str(read_json(path).get("base_model_name_or_path") or "BASE")
        merge = f"nf4conv dequantize {shlex.quote(base)} MERGED"
        merge += f" --lora {shlex.quote(str(opened.folder))}"
        raise PlanError(
            f"{place}: has an {ADAPTER_CONFIG}, so that transformers would load {base} instead; "
            f"merge the adapter first: {merge}; or remove that file",
            path=opened.folder,
        )


def _ask_all(
    question: "Question", original: Source, outs: Sequence[Source], options: EvaluateOptions
) -> list[dict[str, float]]:
    """Asks the original, then each model in 4 bits, and measures how far the answers are apart."""
    progress = options.progress or (lambda _: None)
    begin(progress, [Step("evaluating", 1, "evaluating", is_share=True)])
    share = 1 / len(question.ids) / (1 + len(outs))
    measure = _state_figures if question.kind == "encoder" else _token_figures

    def answers_of(out: Source) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        file.seek(0)
        for answer, targets in answers(load(question, out.folder), question):
            stored = bytearray(file.read(answer.numel() * answer.itemsize))
            before = torch.frombuffer(stored, dtype=torch.float32).view(answer.shape)
            yield before.to(answer.device), answer, targets
            progress(len(answer) * share)

    with tempfile.TemporaryFile() as file, torch.inference_mode():
        for answer, _ in answers(load(question, original.folder, options.variant), question):
            file.write(answer.cpu().numpy().tobytes())
            progress(len(answer) * share)
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
    """Chooses what to ask, by the config and the tokenizer of the first model in 4 bits.

    Raises:
        PlanError: transformers is not installed, or cannot use the architecture or the tokens; or
            the models are not of one kind.
    """
    for name in ("transformers", "bitsandbytes"):  # importing them takes long
        if importlib.util.find_spec(name) is None:
            raise _lacks_libraries(f"there is no {name}")
    device = str(find_device(options.device))
    first = outs[0]
    vocabulary = _vocabulary(first)
    for other in outs[1:]:
        _require_alike(first, other)
    text = None if options.text is None else Path(options.text)
    content = _read_content(first.folder, text, options.tokens or _TOKENS)
    kind, loader = _kind_of_model(first.config or {})  # importing transformers takes long
    width = vocabulary
    if kind == "encoder":
        width = _size(first, "hidden_size") or _size(first, "dim") or 1
    window = _WINDOWS[kind]
    for key in ("max_position_embeddings", "n_positions"):
        window = min(window, _size(first, key) or window)
    wanted = options.tokens or max(window, min(_TOKENS, _MOST_BYTES // (4 * width)))
    mask: int | None = None
    ends: tuple[int, ...] = ()
    if isinstance(content, str):
        ids, mask, ends = _tokenized(first.folder, text, content, wanted)
    else:
        ids = content[:wanted]
    if kind == "causal":
        ends = ()
    name = _SHIPPED_TEXT if text is None else text.name
    if ids.size < 2 or ids.min() < 0 or ids.max() >= vocabulary:
        raise PlanError(f"{name}: expected at least two token ids from 0 to {vocabulary - 1:,}")
    window = min(window - len(ends), ids.size)
    if window < 2:
        raise PlanError(
            f"{first.folder}: takes {window} tokens at a time, which are too few to compare"
        )
    whole = ids.size // window * window
    return Question(
        kind=kind,
        loader=loader,
        ids=torch.from_numpy(ids[:whole].reshape(-1, window)),
        text=name,
        mask=mask if kind == "masked" else None,
        ends=ends,
        width=width,
        device=device,
    )


def _lacks_libraries(reason: str) -> PlanError:
    return PlanError(
        f"evaluate needs transformers and bitsandbytes: pip install 'nf4conv[evaluate]' ({reason})"
    )


def _vocabulary(out: Source) -> int:
    """Returns the number of tokens that a model knows."""
    vocabulary = _size(out, "vocab_size")
    if vocabulary is None:
        raise PlanError(
            f"{out.folder}: its config has no vocab_size, so the tokens cannot be checked"
        )
    return vocabulary


def _size(out: Source, key: str) -> int | None:
    """Returns a size in the config of a language model; None if it is not there."""
    config = out.config or {}
    for part in ("text_config", "llm_config"):
        own = config.get(part)
        if own is not None and not isinstance(own, Mapping):
            raise PlanError(f"{out.folder}/config.json: {part} is {own!r:.80}, and no object")
        config = own or config
    value = config.get(key)
    if value is None or (type(value) is int and value > 0):
        return value
    raise PlanError(f"{out.folder}/config.json: {key} is {value!r:.80}, which is no size")


def _require_alike(first: Source, other: Source) -> None:
    """Refuses a model that cannot be asked what another one is asked."""
    expected, found = (
        f"{architecture_of(out.config or {})} with {_vocabulary(out):,} tokens"
        for out in (first, other)
    )
    if found != expected:
        raise PlanError(
            f"{other.folder}: is {found}, and {first.folder} is {expected}; evaluate compares "
            f"forms of one model"
        )


def _kind_of_model(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the kind of model of a config, and the class of transformers that loads it."""
    try:
        import bitsandbytes  # noqa: F401
        import transformers
        from transformers.models.auto import modeling_auto as auto
    except ImportError as error:
        raise _lacks_libraries(str(error)) from error
    # nf4conv shows a bar of its own
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    name = architecture_of(config)
    model_type = config.get("model_type")
    tables: dict[str, Mapping[str, str]] = {"encoder": auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES}
    has_two_halves = bool(config.get("is_encoder_decoder"))
    if not has_two_halves:
        images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        causal = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **images}
        tables = {"masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "causal": causal, **tables}
    for kind, table in tables.items():
        if name in table.values() and hasattr(transformers, name):
            return kind, getattr(transformers, name)
    if str(model_type) in auto.MODEL_MAPPING_NAMES and not has_two_halves:
        return "encoder", transformers.AutoModel
    described = name or "a model whose config names no architecture"
    raise PlanError(f"evaluate cannot run {described} ({model_type})")


def _read_content(out: Path, text: Path | None, most: int) -> Any:
    """Reads token ids, or text: no more than what could be asked for."""
    if text is not None and text.suffix == ".npy":
        return read_ids(text).reshape(-1)[:most].astype(np.int64)
    try:
        if not has_tokenizer(out):
            raise FileNotFoundError("there is no tokenizer in the folder")
        if text is not None:
            with text.open(encoding="utf-8") as file:
                return file.read(_CHARACTERS * most)
    except (OSError, ValueError) as error:
        raise _cannot_tokenize(text or out, error) from error
    from pydoc_data.topics import topics  # prose that comes with every Python

    return "\n".join(topics[key] for key in sorted(topics))[: _CHARACTERS * most]


def _tokenized(
    out: Path, text: Path | None, content: str, wanted: int
) -> tuple[Any, int | None, tuple[int, ...]]:
    """Returns a text's token ids, the id of the mask token, and those before and after a text."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            out, trust_remote_code=False, local_files_only=True
        )
        encoded = tokenizer(
            content[: _CHARACTERS * wanted], add_special_tokens=False, verbose=False
        )
    except Exception as error:  # transformers raises anything
        raise _cannot_tokenize(text or out, error) from error
    ids = np.array(encoded["input_ids"][:wanted], dtype=np.int64)
    first, last, mask = (
        getattr(tokenizer, f"{role}_token_id", None) for role in ("cls", "sep", "mask")
    )
    return ids, mask, () if first is None or last is None else (first, last)


def _cannot_tokenize(place: Path, error: Exception) -> PlanError:
    return PlanError(
        f"{place}: cannot be tokenized ({first_line(error)}); give token ids instead: "
        f"--text ids.npy"
    )


# --- models, and their answers ----------------------------------------------------------------


def _require_stored(question: Question, model: Source) -> None:
    """Refuses a checkpoint that cannot hold the model that its config describes.

    transformers fills with random values what it does not find in the files.
    """
    config = model.config or {}
    excess = excess_of(config, [tensor.name for tensor in model.tensors])
    if excess is not None:
        raise SourceError(f"{model.folder}: its config.json cannot be right: {excess}")
    try:
        parsed = _parsed(question, without_quantization(config))
        build = getattr(question.loader, "_from_config", None) or question.loader.from_config
        with torch.device("meta"):
            built = build(parsed)
    except Exception as error:  # transformers raises anything
        raise SourceError(
            f"{model.folder}: transformers cannot build what its config.json describes: "
            f"{first_line(error)}"
        ) from error
    values = sum(part.numel() for part in chain(built.parameters(), built.buffers()))
    stored = sum(tensor.nbytes for tensor in model.tensors)
    if values > _VALUES_OF_A_BYTE * stored + _ALWAYS_ALLOWED:
        raise SourceError(
            f"{model.folder}: its config.json describes a model of {values:,} values, and its "
            f"files hold {stored:,} bytes; nf4conv verify says more"
        )


def _parsed(question: Question, config: Mapping[str, Any]) -> Any:
    """Returns what transformers makes of a config.json, for the class that loads the models."""
    from transformers import AutoConfig

    return parse_config(config, getattr(question.loader, "config_class", None) or AutoConfig)


def load(question: Question, folder: Path, variant: str | None = None) -> Any:
    """Loads a model as loaders load it; on a CPU in float32, with its 4-bit layers decoded.

    Code that its config.json names is not fetched.
    """
    is_cpu = question.device == "cpu"
    options = {
        "trust_remote_code": False,
        "local_files_only": True,
        "dtype": torch.float32 if is_cpu else "auto",
        "device_map": {"": question.device},
        "variant": variant,
    }
    try:
        config = _parsed(question, read_json(folder / "config.json"))
        model = question.loader.from_pretrained(folder, config=config, **options)
        if is_cpu:
            _decode_layers(model)
            # transformers refuses model.float() for models that were quantized
            torch.nn.Module.float(model)
    except SourceError:
        raise
    except Exception as error:  # transformers raises anything
        raise SourceError(
            f"{folder}: transformers cannot load it: {first_line(error)}; of what another method "
            f"quantized, `nf4conv dequantize` makes a 16-bit model, to give instead",
            path=folder,
        ) from error
    return model.eval()


def _decode_layers(model: Any) -> None:
    """Puts plain layers in the place of those in 4 bits.

    nf4conv decodes them: bitsandbytes' kernels for CPUs decode some weights wrongly whose rows are
    no multiple of the blocksize.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Linear4bit":
            state = getattr(module.weight, "quant_state", None)
            if state is None:
                raise SourceError(
                    f"{model.name_or_path}: {name} is not in 4 bits, but its config.json does not "
                    f"skip it; nf4conv verify says more"
                )
            weight = dequantize_4bit(module.weight.data, state)
            plain = torch.nn.Linear(state.shape[1], state.shape[0], device="meta")
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(name, plain)


def answers(model: Any, question: Question) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
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
        except Exception as error:  # transformers raises anything
            raise SourceError(
                f"{model.name_or_path}: transformers cannot run it: {first_line(error)}"
            ) from error
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
        losses_of_source.append(-before.gather(-1, tokens).cpu())
        losses.append(-after.gather(-1, tokens).cpu())
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
    figures["perplexity_source"] = _perplexity(losses_of_source)
    figures["perplexity"] = _perplexity(losses)
    return figures


def _perplexity(losses: list[torch.Tensor]) -> float:
    mean = float(torch.cat(losses).double().mean())
    return math.exp(min(mean, 700))  # a larger exponent gives no float


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


def _bits_per_weight(outs: Sequence[Source]) -> Iterator[float | None]:
    """Yields the bits of codes and scales for each element of the linear weights, by model.

    The linear weights are those that one of the models has packed: in a model that keeps some of
    them in 16 bits, these count as well.
    """
    structures = [structure_of(out) for out in outs]
    linear = {name for structure in structures for name in structure.weights}
    for structure in structures:
        size = elements = 0
        for name in linear:
            weight = structure.weights.get(name)
            if weight is not None:  # the other components have the same size in every format
                parts = [weight.absmax, weight.nested_absmax]
                size += weight.values.nbytes + sum(part.nbytes for part in parts if part)
                elements += weight.elements
            elif name in structure.plain:
                size += structure.plain[name].nbytes
                elements += structure.plain[name].elements
        yield 8 * size / elements if elements else None
