"""Loads models as their users do, and asks them.

What is an answer depends on the kind of model:

    causal      log-probabilities of the next token at every position but the last of a window
    seq2seq     log-probabilities of the next token in the second half of each window; the encoder
                reads the first half
    masked      log-probabilities at every seventh position, which is masked; at all positions if
                there is no mask token
    encoder     last hidden states, compared token by token, and their mean over a window
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from nf4conv.codec.ops import dequantize_4bit
from nf4conv.commands.evaluating.question import Question
from nf4conv.errors import SourceError, first_line
from nf4conv.models.parsing import parse_config
from nf4conv.sources.encodings.description import describe
from nf4conv.sources.reader import read_json

_BATCH_BYTES: Final = 128 << 20  # of the answers to a batch of windows
_LARGEST_BATCH: Final = 16  # windows
_MASK_EVERY: Final = 7  # positions


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
        config = parse_config(read_json(folder / "config.json"), question.config_class)
        model = question.loader.from_pretrained(folder, config=config, **options)
        if is_cpu:
            _decode_layers(model)
            # transformers refuses model.float() for models that were quantized
            torch.nn.Module.float(model)
    except SourceError:
        raise
    except Exception as error:  # transformers raises anything
        reason = first_line(error)
        if _is_of_other_method(folder):
            reason += "; `nf4conv dequantize` makes a 16-bit model of it, to give instead"
        raise SourceError(
            f"{folder}: transformers cannot load it: {reason}", path=folder
        ) from error
    return model.eval()


def _is_of_other_method(folder: Path) -> bool:
    """Returns True if a model is quantized by a method that nf4conv decodes, but bitsandbytes."""
    try:
        method = describe(read_json(folder / "config.json"), {}).method
    except SourceError:
        return False
    return method not in (None, "bitsandbytes")


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
