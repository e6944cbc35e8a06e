"""Decides about an output head that is the embedding, when an adapter changes one of the two.

PEFT's merge unties them for modules_to_save. It adds LoRA of either one to both, with a warning:
the adapter was not trained for that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from nf4conv.models.config import architecture_of
from nf4conv.models.module_names import TEXT_CONFIGS, TIED_HEADS, module_of
from nf4conv.models.name_patterns import is_embedding
from nf4conv.sources.adapters.adapter import Adapter
from nf4conv.sources.adapters.base import Base
from nf4conv.sources.adapters.modules import shape_made
from nf4conv.sources.tensors import TensorInfo

_WITH_HEAD: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures that have an embedding and a head of the same shape."""


@dataclass(frozen=True)
class _Changed:
    """The weights that an adapter changes, by their names in the model."""

    shapes: Mapping[str, tuple[int, ...]]  # the shape that each is made for
    heads: tuple[str, ...]  # those that are output heads
    embedding: str | None  # the one that is the embedding


def separate_head(base: Base, adapter: Adapter) -> tuple[Adapter, str]:
    """Gives a tied head a tensor of its own if the adapter was trained to make it differ.

    Args:
        base: the source; it gets the tensor, and a config that says so.
        adapter: an adapter.

    Returns:
        adapter: the adapter, without its changes of a head that is to remain the embedding.
        note: what to add to the line about the adapter; empty if no tied head is concerned.

    Raises:
        SourceError: the source has no embedding that the head could be.
    """
    changed = _changed_weights(base, adapter)
    if base.config.get("tie_word_embeddings", True) is False:
        return adapter, ""
    has_head = _has_head(base)
    if not changed.heads and not (changed.embedding and has_head):
        return adapter, ""
    if adapter.config.get("ensure_weight_tying"):
        absent = [name for name in changed.heads if base.find(name) is None]
        return _without(adapter, absent), ", the output head tied to the embedding"
    head = changed.heads[0] if changed.heads else "lm_head.weight"
    if base.find(head) is None:
        shape = changed.shapes.get(head)
        if shape is None and changed.embedding is not None:
            shape = changed.shapes[changed.embedding]
        embeddings = _embeddings_of(base, shape)
        if not has_head or len(embeddings) != 1:
            raise base.lacks(adapter, head)
        base.add(embeddings[0]._replace(name=head))
    _untie_config(base)
    return adapter, ", the output head untied from the embedding"


def _changed_weights(base: Base, adapter: Adapter) -> _Changed:
    """Returns the weights that an adapter changes, with the heads and the embedding among them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in adapter.targeted:
        shape = shape_made(adapter, part)
        if shape is not None:
            shapes[f"{part.module}.weight"] = shape
    for name, tensor in adapter.replaced.items():
        if tensor.shape:
            shapes[name] = tensor.shape
    heads = []
    embedding = None
    for name in shapes:
        if _leaf(name) in TIED_HEADS:
            heads.append(name)
        if embedding is None and is_embedding(_leaf(name)) and base.find(name) is not None:
            embedding = name
    return _Changed(shapes, tuple(heads), embedding)


def _has_head(base: Base) -> bool:
    """Returns True if a model has an embedding and a head that may be the same matrix."""
    if base.config.get("is_encoder_decoder"):  # which scales a tied head, and no other
        return False
    return architecture_of(base.config).endswith(_WITH_HEAD)


def _without(adapter: Adapter, heads: list[str]) -> Adapter:
    """Returns an adapter that leaves these heads as they are."""
    modules = [module_of(name) for name in heads]
    targeted = tuple(part for part in adapter.targeted if part.module not in modules)
    replaced = {name: tensor for name, tensor in adapter.replaced.items() if name not in heads}
    return replace(adapter, targeted=targeted, replaced=replaced)


def _embeddings_of(base: Base, shape: tuple[int, ...] | None) -> list[TensorInfo]:
    """Returns the embeddings of the source that have a shape."""
    found = []
    for name, tensor in base.tensors.items():
        if tensor.shape == shape and is_embedding(_leaf(name)):
            found.append(tensor)
    return found


def _untie_config(base: Base) -> None:
    """Says in the config, and in those of its parts, that the head is no longer the embedding."""
    config = dict(base.config)
    for key in TEXT_CONFIGS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            config[key] = {**nested, "tie_word_embeddings": False}
    config["tie_word_embeddings"] = False
    base.config = config


def _leaf(name: str) -> str:
    """Returns the last part of a module's path, by the name of its weight."""
    return module_of(name).rpartition(".")[2]
