"""Reads the texts of a calibration in windows that its model can take."""

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

from nf4conv.calibrate.model.building import load_tokenizer
from nf4conv.calibrate.text import Text, read_texts, wanted_texts
from nf4conv.calibrate.windows import LENGTH, Windows, choose_windows, tokens_needed
from nf4conv.errors import PlanError
from nf4conv.options import QuantizeOptions
from nf4conv.sources.source import Source

TOKENS: Final = 65536
"""Tokens that calibrate, unless the user asks for another number."""


def cut_texts(
    source: Source, options: QuantizeOptions, model: nn.Module
) -> tuple[list[Text], Windows]:
    """Reads the texts and cuts them into windows.

    Args:
        source: the checkpoint, whose tokenizer is used.
        options: name the texts, and how many tokens calibrate.
        model: the model that reads the windows.

    Raises:
        PlanError: a text cannot be read, or holds a token that the model does not know.
    """
    tokenizers: list[Any] = []

    def tokenizer() -> Any:
        if not tokenizers:
            tokenizers.append(load_tokenizer(source.whole_folder()))
        return tokenizers[0]

    tokens = options.calibration_tokens or TOKENS
    length = _length(model)
    texts = read_texts(wanted_texts(options.calibrate), tokens_needed(tokens, length), tokenizer)
    _require_known_tokens(texts, model, source)
    ends = _ends(tokenizers[0]) if tokenizers else ()
    return texts, choose_windows(texts, tokens, length, options.calibration_seed or 0, ends)


def _length(model: Any) -> int:
    """Returns how many tokens the model reads together."""
    config = model.config.get_text_config()
    length = LENGTH
    for key in ("max_position_embeddings", "n_positions"):
        found = getattr(config, key, None)
        if isinstance(found, int) and found > 0:
            length = min(length, found)
    for name, module in model.named_modules():
        # positions of RoBERTa and its kind begin behind the number of the padding token
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            length = min(length, module.num_embeddings - padding - 1)
    return length


def _ends(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that encoders such as BERT expect around a text; none for other models."""
    first = getattr(tokenizer, "cls_token_id", None)
    last = getattr(tokenizer, "sep_token_id", None)
    return () if first is None or last is None else (first, last)


def _require_known_tokens(texts: Sequence[Text], model: Any, source: Source) -> None:
    """Raises a PlanError if a text has a token id that the model does not know."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for text in texts:
        largest = int(text.ids.max())
        least = int(text.ids.min())
        if least < 0 or largest >= vocabulary:
            wrong = least if least < 0 else largest
            raise PlanError(
                f"{text.name}: holds the token id {wrong:,}, but {source} has {vocabulary:,} tokens"
            )
