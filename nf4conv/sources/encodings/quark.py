"""Says what AMD's Quark stores, by its config; refuses what nf4conv does not decode.

    W   F8    W_scale [], [out], or blocks           FP8, decoded as of all who write it
    W   I8    W_scale, W_zero_point [] or [out]      INT8
    W   U8    W_scale U8 [out, in / 32]              MXFP4
    W   I32   W_scale [groups, out], W_zero_point    INT4: [in, out / 8], the words of AWQ

So quark/torch/export/nn/modules/realquantizer.py and quark/torch/utils/pack.py of Quark 0.13 write
them. Integers of 4 bits are signed, in two's complement, or unsigned. Only the config says which.
All releases on PyPI, 0.6 to 0.13, write scales of integers as [groups, out]. Those before wrote
[out, groups]. The config names the release from 0.9 on.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nf4conv.errors import UndecodableError

_DECODED: Final = {
    "fp8_e4m3": ("per_tensor", "per_channel", "per_block"),
    "fp8_e5m2": ("per_tensor", "per_channel", "per_block"),
    "fp4": ("per_group",),
    "int4": ("per_group",),
    "uint4": ("per_group",),
    "int8": ("per_tensor", "per_channel"),
}
"""The values of qscheme that nf4conv decodes, by that of dtype."""

_AXES: Final = {"per_channel": (0, None), "per_group": (1, -1, None)}
"""The axes along which matrices are read, by the value of qscheme."""

_SCALES_OF_FP4: Final = ("e8m0", "float32", None)
"""Values of scale_format of FP4 whose scales, if they are bytes, are powers of two."""

_ROTATIONS: Final = ("rotation", "quarot")
"""Names in algo_config of what rotates weights, and activations while the model runs."""


def check_quark(description: Mapping[str, Any]) -> None:
    """Refuses what Quark stores in another way.

    Raises:
        UndecodableError: the description names it.
    """
    found = list(weights_of_quark(description))
    for weight in found:
        dtype, scheme = str(weight.get("dtype")), str(weight.get("qscheme"))
        axis = weight.get("ch_axis")
        if scheme not in _DECODED.get(dtype, ()) or axis not in _AXES.get(scheme, (axis,)):
            raise _refused(f"weights in {dtype:.20} {scheme:.20}", "they lie in another way")
        scales = weight.get("scale_format")
        if dtype == "fp4" and scales not in _SCALES_OF_FP4:
            raise _refused(f"scale_format {scales!r:.40}", "its scales are no powers of two")
    if len(_integers(found)) > 1:
        raise _refused("weights in int4 and in uint4", "nothing tells them apart")
    _check_export(description.get("export"), has_integers=bool(_integers(found)))
    if any(name in _ROTATIONS for name in _algorithms(description)):
        raise _refused("algo_config rotation", "its weights are rotated")


def _check_export(exported: Any, *, has_integers: bool) -> None:
    """Refuses integers in another order, and weights that are not rounded until they are loaded.

    Args:
        exported: what the config says of the export.
        has_integers: True if there are integers of 4 bits.

    Raises:
        UndecodableError: the config names either.
    """
    if not isinstance(exported, Mapping):
        return
    order = exported.get("pack_method", "reorder")
    if has_integers and order != "reorder":
        raise _refused(f"pack_method {order!r:.40}", "its integers lie in another order")
    stored = exported.get("weight_format", "real_quantized")
    if stored not in ("real_quantized", None):
        raise _refused(f"weight_format {stored!r:.40}", "its weights are stored as floats")


def weights_of_quark(description: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields how weights are stored: what the config says of all layers, and of some.

    Raises:
        UndecodableError: they were rounded twice, with scales for each time.
    """
    layers = [description.get("global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        special = description.get(key)
        if isinstance(special, Mapping):
            layers += special.values()
    for layer in layers:
        weight = layer.get("weight") if isinstance(layer, Mapping) else None
        if isinstance(weight, list):
            raise _refused("weights of two stages", "they have scales of scales")
        if isinstance(weight, Mapping):
            yield weight


def integers_of_quark(description: Mapping[str, Any]) -> str | None:
    """Returns what integers of 4 bits are: "int4" or "uint4"; None if there are none."""
    names = _integers(list(weights_of_quark(description)))
    return names[0] if names else None


def _integers(weights: list[Mapping[str, Any]]) -> list[str]:
    """Returns the dtypes of integers of 4 bits."""
    found = {weight.get("dtype") for weight in weights}
    return [name for name in ("int4", "uint4") if name in found]


def _algorithms(description: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of what was done to the weights before they were rounded."""
    algorithms = description.get("algo_config")
    if isinstance(algorithms, Mapping):
        algorithms = [algorithms]
    for algorithm in algorithms if isinstance(algorithms, list) else ():
        if isinstance(algorithm, Mapping):
            yield str(algorithm.get("name")).lower()


def _refused(what: str, why: str) -> UndecodableError:
    """Returns the error of what is stored in another way."""
    return UndecodableError(
        f"already quantized: quant_method quark, {what}; give the checkpoint that it was made "
        f"from: {why}"
    )
