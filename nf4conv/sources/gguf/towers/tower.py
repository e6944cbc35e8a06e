"""Says what a kind of tower consists of."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nf4conv.sources.gguf.families.family import GgufFamily


@dataclass(frozen=True)
class Tower:
    """A tower and its projector, and the models of transformers that see by it.

    Attributes:
        family: the names of its tensors, and the model types of the whole models in config.json.
        text_types: model types that the config gives the text model, besides those of its family.
        text_prefixes: how names in the text model begin, and how in the whole model.
        projection: the matrix that ends in the text model's hidden size, by its name in
            transformers.
        projected: which of its dimensions is that size.
    """

    family: GgufFamily
    projection: str
    text_types: tuple[str, ...] = ()
    text_prefixes: Mapping[str, str] = field(default_factory=dict)
    projected: int = 0
