"""Makes tokenizer.json of the metadata of a GGUF file.

Two kinds of tokenizers are made: byte-level BPE with the ways of cutting text that Llama 3, Qwen 2,
Kimi K2 and GPT-2 use, and the BPE of SentencePiece, as Llama 2, Mistral and Gemma have it. For
others `tokenizer_files` returns nothing. The layout is that of the library tokenizers.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from nf4conv.sources.gguf.header import Texts

_MARKS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
_REST: Final = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

_HAN: Final = "[\\p{Han}]+"
_UPPER: Final = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
_LOWER: Final = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
_BEFORE: Final = "[^\\r\\n\\p{L}\\p{N}]?"
_BEHIND: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS_OF_KIMI: Final = (
    f"{_HAN}|{_BEFORE}{_UPPER}*{_LOWER}+{_BEHIND}|{_BEFORE}{_UPPER}+{_LOWER}*{_BEHIND}"
)

_CUTS: Final[Mapping[str, str | None]] = {
    "llama-bpe": f"{_MARKS}|\\p{{N}}{{1,3}}|{_REST}",
    "qwen2": f"{_MARKS}|\\p{{N}}|{_REST}",
    "kimi-k2": f"{_WORDS_OF_KIMI}|\\p{{N}}{{1,3}}|{_REST}",
    "gpt-2": None,
}
"""The regular expression that cuts text into words, by `tokenizer.ggml.pre`.

None is the one that the library has built in: that of GPT-2. Source: llama_tokenizer_pre in
llama.cpp's llama-vocab.cpp; of Kimi K2, pat_str in its tokenization_kimi.py.
"""

_TAKES_WHOLE_WORDS: Final = ("llama-bpe", "kimi-k2")
"""Values of `tokenizer.ggml.pre` by which a word that is a token is taken without any merges."""

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
"""Types of tokens that text is searched for before it is cut (llama_token_type in llama.h)."""

_SPACE: Final = "▁"
"""What SentencePiece writes for a space."""

_BPE: Final = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
}
"""A model of BPE without its vocabulary and its merges."""

_AT_A_TIME: Final = 4096  # merges

_ROLES: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Callable[[], Iterable[bytes]]] | None:
    """Returns what makes the files of a tokenizer; None if the metadata does not say enough."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Texts) or len(set(tokens)) != len(tokens):
        return None
    if kind == "gpt2":
        pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
        has_merges = isinstance(metadata.get("tokenizer.ggml.merges"), Texts)
        is_known = has_merges and isinstance(pre, str) and pre in _CUTS
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        is_known = kind == "llama" and isinstance(scores, list) and len(scores) == len(tokens)
    if not is_known:
        return None
    return {
        "tokenizer.json": partial(tokenizer_json, metadata),
        "tokenizer_config.json": partial(_tokenizer_config, metadata),
    }


def tokenizer_json(metadata: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields the content of tokenizer.json, in pieces: lists of all merges would be large."""
    is_of_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    tokens = list(metadata["tokenizer.ggml.tokens"])
    if is_of_sentencepiece:
        made = _of_sentencepiece(metadata, tokens)
        merges = _merges_by_score(tokens, metadata["tokenizer.ggml.scores"])
    else:
        made = _byte_level(metadata)
        merges = (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])
    made["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens),
        "post_processor": _post_processor(metadata, tokens, begins=is_of_sentencepiece),
        **made,
    }
    # the model is the last of the whole, and its merges are the last of the model
    yield json.dumps(whole).removesuffix("}}").encode() + b', "merges": ['
    separator = ""
    while some := list(islice(merges, _AT_A_TIME)):
        yield f"{separator}{json.dumps(some)[1:-1]}".encode()
        separator = ", "
    yield b"]}}\n"


def _byte_level(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of tokenizer.json that only a byte-level BPE has."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    pattern = _CUTS[pre]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps: list[dict[str, Any]] = []
    if pattern is not None:
        split = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        steps.append({"type": "Split", **split})
    steps.append({**to_bytes, "use_regex": pattern is None})
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**to_bytes, "use_regex": True},
        "model": {**_BPE, "ignore_merges": pre in _TAKES_WHOLE_WORDS},
    }


def _of_sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """Returns the parts of tokenizer.json that only a BPE of SentencePiece has."""
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizers: list[dict[str, Any]] = []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        normalizers.append({"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    unknown = _token(metadata, tokens, "unk_token")
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**_BPE, "fuse_unk": True, "byte_fallback": True, "unk_token": unknown},
    }


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> Iterator[list[str]]:
    """Yields the merges that do what SentencePiece does: the best token of two others first.

    A token can be made of several pairs. Those whose parts have smaller numbers come first.
    """
    number_of = {token: number for number, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int]] = []
    for number, token in enumerate(tokens):
        for place in range(1, len(token)):
            left = number_of.get(token[:place])
            right = number_of.get(token[place:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right))
    found.sort()
    for _, _, left, right in found:
        yield [tokens[left], tokens[right]]


def _added_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the tokens that text is searched for before it is cut."""
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        return []
    added = []
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED):
            whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            added.append({"id": number, "content": token, **whole, "special": kind == _CONTROL})
    return added


def _post_processor(
    metadata: Mapping[str, Any], tokens: Sequence[str], *, begins: bool
) -> dict[str, Any] | None:
    """Returns what puts the first and last token around a text; None if neither is wanted.

    A text `begins` with a special token unless the metadata says otherwise.
    """
    first = last = None
    if metadata.get("tokenizer.ggml.add_bos_token", begins):
        first = _token(metadata, tokens, "bos_token")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        last = _token(metadata, tokens, "eos_token")
    special = {}
    for role, token in (("bos_token", first), ("eos_token", last)):
        if token is not None:
            special[token] = {"id": token, "ids": [metadata[_ROLES[role]]], "tokens": [token]}
    if not special:
        return None
    single = _around("A", 0, first, last)
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *_around("B", 1, first, last)],
        "special_tokens": special,
    }


def _around(text: str, type_id: int, first: str | None, last: str | None) -> list[dict[str, Any]]:
    """Returns the parts of a template: a text, and the tokens around it."""
    parts = [("SpecialToken", first), ("Sequence", text), ("SpecialToken", last)]
    return [{kind: {"id": part, "type_id": type_id}} for kind, part in parts if part is not None]


def _tokenizer_config(metadata: Mapping[str, Any]) -> list[bytes]:
    """Returns the content of tokenizer_config.json."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role in _ROLES:
        token = _token(metadata, tokens, role)
        if token is not None:
            settings[role] = token
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    architecture = metadata.get("general.architecture")
    length = metadata.get(f"{architecture}.context_length")
    if isinstance(length, int):
        settings["model_max_length"] = length
    settings["clean_up_tokenization_spaces"] = False
    return [(json.dumps(settings, indent=2) + "\n").encode()]


def _token(metadata: Mapping[str, Any], tokens: Sequence[str], role: str) -> str | None:
    """Returns the token of a role, such as "bos_token"; None if there is none."""
    number = metadata.get(_ROLES[role])
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        return None
    return tokens[number]
