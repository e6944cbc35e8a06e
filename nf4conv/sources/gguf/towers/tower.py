"""Says what a kind of tower consists of."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nf4conv.sources.gguf.families.family import GgufFamily


@dataclass(frozen=True)
class Tower:
    """A tower and its projector, and the models of transformers that see by it.

    Attributes:
        family: the names of its tensors, and the model types of the whole models in config.json.
        projection: the matrix that ends in the text model's hidden size, by its name in
            transformers.
        text_types: model types that the config gives the text model, besides those of its family.
        text_prefixes: how names in the text model begin, and how in the whole model.
        projected: which of the dimensions of `projection` is that size.
        lacks_last_layers: True if the converter leaves out layers behind the one whose output the
            projector takes.
        masks_image_token: True if transformers looks up no embedding for the token of an image.
    """

    family: GgufFamily
    projection: str
    text_types: tuple[str, ...] = ()
    text_prefixes: Mapping[str, str] = field(default_factory=dict)
    projected: int = 0
    lacks_last_layers: bool = False
    masks_image_token: bool = False


def in_layers(layer: str, modules: Mapping[str, str]) -> dict[str, str]:
    """Returns the names of modules that all layers have, by their names in the file.

    Args:
        layer: how the names begin in transformers, `*` for the number of the layer.
        modules: the rest of the name in transformers by that in the file.
    """
    return {f"v.blk.*.{module}": f"{layer}.{name}" for module, name in modules.items()}
