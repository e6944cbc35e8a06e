"""Chooses what all models of an evaluation are asked.

What is wrong with text or models is found first, before transformers is imported and a model is
loaded: both take long.
"""

import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from nf4conv.errors import PlanError, first_line
from nf4conv.models.config import architecture_of
from nf4conv.options import EvaluateOptions
from nf4conv.run.device.on_torch.device import find_device
from nf4conv.sources.reader import read_json
from nf4conv.sources.source import Source
from nf4conv.sources.token_ids import has_tokenizer, read_ids
from nf4conv.sources.weight_files import ADAPTER_CONFIG

_WINDOWS: Final = {"causal": 512, "seq2seq": 512, "masked": 512, "encoder": 128}
"""Tokens of a window by the kind of model, unless the model takes fewer."""

_TOKENS: Final = 16384  # that all models read, unless the user asks for another number
_MOST_BYTES: Final = 2 << 30  # of the original's answers, unless the user asks for more tokens
_CHARACTERS: Final = 16  # of text that are read for a token: more than one has on average

_SHIPPED_TEXT: Final = "pydoc_data.topics, the reference of the Python language"


@dataclass(frozen=True)
class Question:
    """Holds what all models are asked.

    Attributes:
        kind: "causal", "seq2seq", "masked" or "encoder".
        loader: the class of transformers that loads the models.
        config_class: the class of transformers that parses their configs.
        ids: token ids, [windows, window] int64.
        text: where the tokens come from.
        mask: the id of the mask token; None if no token is to be masked.
        ends: the ids of the tokens before and after a window that encoders expect; empty if there
            are none.
        width: the size of an answer: that of the vocabulary, or of an encoder's hidden states.
        device: where the models run: "cpu", "cuda" or "cuda:N".
    """

    kind: str
    loader: Any
    config_class: Any
    ids: torch.Tensor
    text: str
    mask: int | None
    ends: tuple[int, ...]
    width: int
    device: str


@dataclass(frozen=True)
class _Tokens:
    """Holds token ids, and the special tokens of the tokenizer that made them."""

    # int64
    ids: npt.NDArray[np.int64]
    # id of the mask token; None if there is none, or if the ids come from a file
    mask: int | None = None
    # ids of the tokens before and after a text; empty if there are not both
    ends: tuple[int, ...] = ()


def make_question(outs: Sequence[Source], options: EvaluateOptions, device: str) -> Question:
    """Chooses what to ask, by the config and the tokenizer of the first model in 4 bits.

    Args:
        outs: the models in 4 bits, at least one.
        options: the text, and how many tokens of it.
        device: where the models run, as --device has it.

    Raises:
        PlanError: transformers is not installed, or cannot use the architecture or the tokens; or
            the models are not of one kind.
    """
    _require_libraries()
    device = str(find_device(device))
    first = outs[0]
    out = first.folder
    vocabulary = _vocabulary(first)
    for other in outs[1:]:
        _require_alike(first, other)
    given = None if options.text is None else Path(options.text)
    # ids, or a text for the tokenizer
    content = _read_content(out, options)
    kind, loader = _kind_of_model(first.config or {})
    width = vocabulary
    if kind == "encoder":
        width = _size(first, "hidden_size") or _size(first, "dim") or 1
    window = _longest_window(first, kind)
    wanted = options.tokens or max(window, min(_TOKENS, _MOST_BYTES // (4 * width)))
    if isinstance(content, str):
        tokens = _tokenize(out, given, content, wanted)
    else:
        tokens = _Tokens(content[:wanted])
    ids = tokens.ids
    text = _SHIPPED_TEXT if given is None else given.name
    if ids.size < 2 or ids.min() < 0 or ids.max() >= vocabulary:
        raise PlanError(f"{text}: expected at least two token ids from 0 to {vocabulary - 1:,}")
    ends = tokens.ends if kind in ("encoder", "masked") else ()
    window = min(window - len(ends), ids.size)
    if window < 2:
        raise PlanError(f"{out}: takes {window} tokens at a time, which are too few to compare")
    whole = ids.size // window * window
    return Question(
        kind=kind,
        loader=loader,
        config_class=_config_class(loader),
        ids=torch.from_numpy(ids[:whole].reshape(-1, window)),
        text=text,
        mask=tokens.mask if kind == "masked" else None,
        ends=ends,
        width=width,
        device=device,
    )


def _longest_window(out: Source, kind: str) -> int:
    """Returns the most tokens that a model of this kind is asked about together."""
    window = _WINDOWS[kind]
    for key in ("max_position_embeddings", "n_positions"):
        window = min(window, _size(out, key) or window)
    return window


def refuse_adapter(model: str | Path, folder: Path) -> None:
    """Refuses a folder in which transformers would find an adapter, and load the base it names.

    Args:
        model: the model, as it was given.
        folder: where it is.

    Raises:
        PlanError: there is an adapter_config.json.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return
    base = str(read_json(path).get("base_model_name_or_path") or "BASE")
    merge = f"nf4conv dequantize {shlex.quote(base)} MERGED --lora {shlex.quote(str(folder))}"
    raise PlanError(
        f"{model}: has an {ADAPTER_CONFIG}, so that transformers would load {base} instead; merge "
        f"the adapter first: {merge}; or remove that file",
        path=folder,
    )


def _require_libraries() -> None:
    """Raises a PlanError if a library is missing, before it would be imported, which takes long."""
    for name in ("transformers", "bitsandbytes"):
        if importlib.util.find_spec(name) is None:
            raise PlanError(
                f"evaluate needs transformers and bitsandbytes: "
                f"pip install 'nf4conv[evaluate]' (there is no {name})"
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
    value = _text_config(out).get(key)
    if value is None or (type(value) is int and value > 0):
        return value
    raise PlanError(f"{out.folder}/config.json: {key} is {value!r:.80}, which is no size")


def _require_alike(first: Source, other: Source) -> None:
    """Refuses a model that cannot be asked what another one is asked."""
    expected = _described(first)
    found = _described(other)
    if found != expected:
        raise PlanError(
            f"{other.folder}: is {found}, and {first.folder} is {expected}; evaluate compares "
            f"forms of one model"
        )


def _described(out: Source) -> str:
    return f"{architecture_of(out.config or {})} with {_vocabulary(out):,} tokens"


def _text_config(out: Source) -> Mapping[str, Any]:
    """Returns the part of a config that describes the language model."""
    config = out.config or {}
    for key in ("text_config", "llm_config"):
        part = config.get(key)
        if isinstance(part, Mapping):
            return part
        if part is not None:
            raise PlanError(f"{out.folder}/config.json: {key} is {part!r:.80}, and no object")
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
    if str(model_type) in auto.MODEL_MAPPING_NAMES and not config.get("is_encoder_decoder"):
        return "encoder", transformers.AutoModel
    described = name or "a model whose config names no architecture"
    raise PlanError(f"evaluate cannot run {described} ({model_type})")


def _config_class(loader: Any) -> Any:
    """Returns the class that parses the config of what a class of transformers loads."""
    import transformers

    return getattr(loader, "config_class", None) or transformers.AutoConfig


def _read_content(out: Path, options: EvaluateOptions) -> npt.NDArray[np.int64] | str:
    """Reads token ids, or text: no more than what could be asked for."""
    text = None if options.text is None else Path(options.text)
    most = options.tokens or _TOKENS
    if text is not None and text.suffix == ".npy":
        return read_ids(text).reshape(-1)[:most].astype(np.int64)
    try:
        if not has_tokenizer(out):
            raise FileNotFoundError("there is no tokenizer in the folder")
        if text is not None:
            with text.open(encoding="utf-8") as file:
                return file.read(_CHARACTERS * most)
    except (OSError, ValueError) as error:
        raise PlanError(_not_tokenized(text or out, first_line(error))) from error
    from pydoc_data.topics import topics  # prose that comes with every Python

    return "\n".join(topics[key] for key in sorted(topics))[: _CHARACTERS * most]


def _tokenize(out: Path, text: Path | None, content: str, wanted: int) -> _Tokens:
    """Makes token ids of a text with the model's tokenizer."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            out, trust_remote_code=False, local_files_only=True
        )
        encoded = tokenizer(
            content[: _CHARACTERS * wanted], add_special_tokens=False, verbose=False
        )
    except Exception as error:  # transformers raises anything
        raise PlanError(_not_tokenized(text or out, first_line(error))) from error
    ids = np.array(encoded["input_ids"][:wanted], dtype=np.int64)
    first = getattr(tokenizer, "cls_token_id", None)
    last = getattr(tokenizer, "sep_token_id", None)
    ends = () if first is None or last is None else (first, last)
    return _Tokens(ids, getattr(tokenizer, "mask_token_id", None), ends)


def _not_tokenized(place: Path, reason: str) -> str:
    return f"{place}: cannot be tokenized ({reason}); give token ids instead: --text ids.npy"
