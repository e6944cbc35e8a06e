"""Puts a text model and a tower together, if they fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nf4conv.errors import SourceError
from nf4conv.sources.gguf.families.family import GgufFamily
from nf4conv.sources.gguf.numbers import positive
from nf4conv.sources.gguf.towers.opening import TowerFile
from nf4conv.sources.tensors import TensorInfo


def check_config(path: Path, config: Mapping[str, Any], found: TowerFile, text: GgufFamily) -> None:
    """Refuses a config of another model than a tower and a text model make.

    Args:
        path: the file of the text model, for messages.
        config: what --config-from names.
        found: the tower.
        text: the family of the text model.
    """
    tower = found.tower
    model_type = config.get("model_type")
    known = (tower.family.model_type, *tower.family.also)
    if model_type not in known:
        raise SourceError(
            f"{found.path}: is a tower of {' or '.join(known)}, but --config-from names a "
            f"{model_type}",
            path=found.path,
        )
    of_text = config.get("text_config")
    text_type = of_text.get("model_type") if isinstance(of_text, Mapping) else None
    if text_type not in (None, text.model_type, *text.also, *tower.text_types):
        raise SourceError(
            f"{path}: is a {text.model_type}, but the text model of --config-from is a {text_type}",
            path=path,
        )
    _check_layers(config, found)


def _check_layers(config: Mapping[str, Any], found: TowerFile) -> None:
    """Refuses a tower with another number of layers than the config says."""
    of_vision = config.get("vision_config")
    if not isinstance(of_vision, Mapping):
        return
    stated = positive(of_vision, "num_hidden_layers") or positive(of_vision, "depth")
    if stated is not None and stated != found.layers:
        raise SourceError(
            f"{found.path}: has {found.layers} layers, and the tower of --config-from has {stated}",
            path=found.path,
        )


def put_together(
    path: Path, text: Sequence[TensorInfo], found: TowerFile, dtype: str
) -> tuple[TensorInfo, ...]:
    """Returns the tensors of the whole model.

    Args:
        path: the file of the text model, for messages.
        text: its tensors, as they are presented.
        found: the tower.
        dtype: the tag of the dtype that they are presented in.

    Raises:
        SourceError: the tower lacks its projector, or belongs to a text model of another size.
    """
    tower = found.tower
    presented = found.presented(dtype)
    by_name = {tensor.name: tensor for tensor in presented}
    projection = by_name.get(tower.projection)
    if projection is None:
        raise SourceError(f"{found.path}: has no {tower.projection}", path=found.path)
    if len(projection.shape) != 2:
        raise SourceError(f"{found.path}: {tower.projection} is no matrix", path=found.path)
    made = projection.shape[tower.projected]
    embeddings = _embeddings_of(text)
    taken = None if embeddings is None else embeddings.shape[-1]
    if made != taken:
        raise SourceError(
            f"{found.path}: makes vectors of {made} values, but {path.name} takes those of "
            f"{taken}; it is the tower of another model",
            path=found.path,
        )
    renamed = []
    for tensor in text:
        name = tensor.name
        for old, new in tower.text_prefixes.items():
            if name.startswith(old):
                name = f"{new}{name.removeprefix(old)}"
                break
        renamed.append(tensor._replace(name=name))
    return (*renamed, *presented)


def with_vocabulary(
    config: Mapping[str, Any], text: Sequence[TensorInfo]
) -> tuple[Mapping[str, Any], str | None]:
    """Returns a config with as many tokens as the file has, and what to tell about that.

    llama.cpp's converter leaves out embeddings behind the last token of Gemma 3's tokenizer.
    """
    embeddings = _embeddings_of(text)
    of_text = config.get("text_config")
    if embeddings is None or not isinstance(of_text, Mapping):
        return config, None
    rows = embeddings.shape[0]
    stated = of_text.get("vocab_size")
    if rows == stated:
        return config, None
    changed = {**config, "text_config": {**of_text, "vocab_size": rows}}
    if stated is None:
        return changed, None
    return changed, f"config.json says {rows:,} tokens and not {stated:,}, for the file has so many"


def _embeddings_of(text: Sequence[TensorInfo]) -> TensorInfo | None:
    """Returns the embeddings of a text model; None if it has none that are a matrix."""
    for tensor in text:
        if tensor.name.endswith("embed_tokens.weight") and len(tensor.shape) == 2:
            return tensor
    return None
