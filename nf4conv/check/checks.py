"""Names every check of a finished checkpoint."""

from collections.abc import Mapping
from typing import Final

CHECKS: Final[Mapping[str, str]] = {
    # what verify finds in the headers and small tensors of the checkpoint itself
    "files": "every weight file is a whole safetensors file, and no other lies beside them",
    "index": "the index and the headers name the same tensors in the same files",
    "components": "every packed weight has all its tensors, and none is left over",
    "quant state": "every quant state is what bitsandbytes reads",
    "layout": "dtypes and shapes of the tensors of a weight agree",
    "one shard": "the tensors of a weight are in one file",
    "code maps": "the stored code values are those of the data type",
    "uniform": "one data type and one nesting for the whole checkpoint",
    "experts": "the experts of each layer are whole, and packed alike",
    "config": "config.json describes what is stored",
    "skip list": "every loader would make those modules 4-bit that are packed, and no others",
    # what it finds in the values, most of it with the source beside the checkpoint
    "scales": (
        "every scale is finite and, if not searched, not negative; "
        "with a source, it is that of the source"
    ),
    "finite": "no value of a tensor that is compared with nothing is NaN or infinite",
    "source": "the source is the model that this was made from",
    "names": "the tensors are those of the source",
    "model config": "config.json describes the model of the source",
    "record": "nf4conv.json says what is stored",
    "copied files": "the files beside the weights are those of the source",
    "copies": "tensors that are not packed equal the source's",
    "codes": "every code is the nearest to its value in the source",
    "bound": "every value is within the format's worst-case error",
    "calibrated": "the bytes of calibrated weights are those that nf4conv.json has the SHA-256 of",
    "tolerance": "the relative error of every weight is within the tolerance",
    "values": "no value differs from the source's by more than --tolerance allows",
    "exact": "the bytes are those that quantizing the source gives, or that calibration recorded",
}
"""What each check looks at, by its name, in the order in which reports list them."""

OF_FILES: Final = ("files", "index", "components", "config")
"""The checks that every verification makes."""

OF_WEIGHTS: Final = (
    "quant state",
    "layout",
    "one shard",
    "code maps",
    "uniform",
    "experts",
    "skip list",
    "scales",
)
"""The checks of weights in 4 bits."""

WITH_SOURCE: Final = ("source", "names", "model config", "copied files", "copies")
"""The checks that a verification makes if there is a source."""

OF_WEIGHTS_WITH_SOURCE: Final = ("codes", "bound", "tolerance")
"""The checks of weights in 4 bits if there is a source."""
