"""Says what a kind of tower consists of."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from nf4conv.sources.gguf.families.family import GgufFamily, Join

IN_LANGUAGE_MODEL: Final = {
    "model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
"""How names in the text model begin alone, and in whole models that keep it in `language_model`."""


@dataclass(frozen=True)
class Tower:
    """A tower and its projector, and the models of transformers that see or hear by it.

    Attributes:
        family: the names of its tensors, and the model types of the whole models in config.json.
        projection: the matrix that ends in the text model's hidden size, by its name in
            transformers.
        text_types: model types that the config gives the text model, besides those of its family.
        text_prefixes: the beginnings of names in the whole model, by those in the text model alone.
        projected: the dimension of `projection` that has the text model's hidden size.
        lacks_last_layers: True if the converter leaves out layers behind the one whose output the
            projector takes.
        masks_image_token: True if transformers looks up no embedding for the token of an image.
        stacked: experts of the text model that are one tensor in the whole model, and several in
            the text model alone, by the model type of the whole.
        hears: True if it takes sounds, and no images.
    """

    family: GgufFamily
    projection: str
    text_types: tuple[str, ...] = ()
    text_prefixes: Mapping[str, str] = field(default_factory=dict)
    projected: int = 0
    lacks_last_layers: bool = False
    masks_image_token: bool = False
    stacked: Mapping[str, tuple[Join, ...]] = field(default_factory=dict)
    hears: bool = False

    @property
    def layer(self) -> str:
        """Returns the beginning of layers' names in the file."""
        return "a.blk" if self.hears else "v.blk"

    @property
    def part(self) -> str:
        """Returns the name of the part of config.json that describes the tower."""
        return "audio_config" if self.hears else "vision_config"

    @property
    def does(self) -> str:
        """Returns a verb for messages: what the tower does."""
        return "hears" if self.hears else "sees"

    def text_family(self, text: GgufFamily, model_type: object) -> GgufFamily:
        """Returns the family of a text model as a part of the whole model.

        Args:
            text: the family of the text model alone.
            model_type: the model type of the whole model.
        """
        stacks = self.stacked.get(str(model_type), ())
        if not stacks:
            return text
        return replace(text, experts={}, joined=(*text.joined, *stacks))


def in_layers(layer: str, modules: Mapping[str, str], kind: str = "v") -> dict[str, str]:
    """Returns the names of modules that all layers have, by their names in the file.

    Args:
        layer: how the names begin in transformers, `*` for the number of the layer.
        modules: the rest of the name in transformers by that in the file.
        kind: the beginning of the names in the file: `v` if the tower sees, `a` if it hears.
    """
    return {f"{kind}.blk.*.{module}": f"{layer}.{name}" for module, name in modules.items()}
