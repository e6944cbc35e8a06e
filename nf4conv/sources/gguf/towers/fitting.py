"""Puts a text model and a tower together, if they fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import SourceError
from nf4conv.sources.gguf.families.family import GgufFamily
from nf4conv.sources.gguf.numbers import positive
from nf4conv.sources.gguf.towers.opening import TowerFile
from nf4conv.sources.tensors import TensorInfo

_LAYER_OF_LLAVA: Final = -2
"""What LlavaConfig of transformers takes for vision_feature_layer by default."""

_KEYS_OF_LAYERS: Final = ("num_hidden_layers", "depth", "encoder_layers")
"""Keys by one of which a tower's config says how many layers it has."""

_KEYS_OF_TOKENS: Final = (
    "image_token_id",
    "image_token_index",
    "audio_token_id",
    "audio_token_index",
)
"""Keys by one of which a config names the token that stands for an image or a sound."""


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
    stated = _layers_of(config, found)
    if stated is None or stated == found.layers:
        return
    if found.tower.lacks_last_layers and _last_layer_taken(config, stated) == found.layers:
        return
    raise SourceError(
        f"{found.path}: has {found.layers} layers, and the tower of --config-from has {stated}",
        path=found.path,
    )


def _layers_of(config: Mapping[str, Any], found: TowerFile) -> int | None:
    """Returns how many layers the config says that a tower has."""
    part = config.get(found.tower.part)
    if not isinstance(part, Mapping):
        return None
    counts = (positive(part, key) for key in _KEYS_OF_LAYERS)
    return next((count for count in counts if count is not None), None)


def _last_layer_taken(config: Mapping[str, Any], layers: int) -> int | None:
    """Returns after how many layers LLaVA takes the output; None if it takes several."""
    taken = config.get("vision_feature_layer", _LAYER_OF_LLAVA)
    if isinstance(taken, bool) or not isinstance(taken, int):
        return None
    return taken if taken >= 0 else layers + 1 + taken


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


def fitted_config(
    config: Mapping[str, Any], text: Sequence[TensorInfo], found: TowerFile
) -> tuple[Mapping[str, Any], list[str]]:
    """Returns the config of what the files have of a model, and what to tell about that.

    Args:
        config: what --config-from names.
        text: the tensors of the text model, as they are presented.
        found: the tower.

    Raises:
        SourceError: the text model has no embedding for the token of an image or a sound.
    """
    config, notes = _with_layers(config, found)
    embeddings = _embeddings_of(text)
    of_text = config.get("text_config")
    if embeddings is None or not isinstance(of_text, Mapping):
        return config, notes
    tokens = embeddings.shape[0]
    placeholder = next((config[key] for key in _KEYS_OF_TOKENS if key in config), 0)
    is_looked_up = isinstance(placeholder, int) and not found.tower.masks_image_token
    if is_looked_up and placeholder >= tokens:
        what = "a sound" if found.tower.hears else "an image"
        raise SourceError(
            f"{embeddings.file}: has {tokens:,} tokens, and that of {what} is {placeholder:,} by "
            f"--config-from; name the repository of this model",
            path=embeddings.file,
        )
    in_config = of_text.get("vocab_size")
    if in_config == tokens:
        return config, notes
    if in_config is not None:
        notes.append(f"config.json says {tokens:,} tokens as the file has, and not {in_config:,}")
    return {**config, "text_config": {**of_text, "vocab_size": tokens}}, notes


def _with_layers(
    config: Mapping[str, Any], found: TowerFile
) -> tuple[Mapping[str, Any], list[str]]:
    """Returns a config with as many layers as a tower has, and what to tell about that."""
    stated = _layers_of(config, found)
    if stated is None or stated == found.layers:
        return config, []
    part = {**config[found.tower.part], "num_hidden_layers": found.layers}
    changed = {**config, found.tower.part: part, "vision_feature_layer": -1}
    note = (
        f"the tower has {found.layers} of {stated} layers, and no norm behind them: the model "
        f"takes what the last of these layers makes, and config.json says so"
    )
    return changed, [note]


def _embeddings_of(text: Sequence[TensorInfo]) -> TensorInfo | None:
    """Returns the embeddings of a text model; None if it has none that are a matrix."""
    for tensor in text:
        if tensor.name.endswith("embed_tokens.weight") and len(tensor.shape) == 2:
            return tensor
    return None
