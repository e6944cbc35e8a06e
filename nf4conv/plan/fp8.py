"""Plans `dequantize --dtype fp8`: experts in MXFP4 become FP8 in blocks, as the rest is already.

The result has the layout of DeepSeek's own releases in FP8: E4M3 values, a scale for each block,
under the names that the source gives its scales. What is in FP8 is copied.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nf4conv.errors import PlanError
from nf4conv.models.config import OF_EXPERTS, at_all_levels
from nf4conv.options import DequantizeOptions
from nf4conv.plan.jobs import CopyJob
from nf4conv.sources.foreign.config import Block, quantization_of
from nf4conv.sources.foreign.floats import GROUP, POWERS_OF_TWO, Scaled, as_fp8, is_mxfp4
from nf4conv.sources.source import Source

_ENCODED: Final = "from MXFP4 to FP8"
_KEPT: Final = "in FP8 already"


def fp8_groups(
    place: object, source: Source, options: DequantizeOptions
) -> Iterator[list[CopyJob]]:
    """Yields the jobs of each source tensor, which must be in one shard."""
    block = _block_of(place, source)
    dtype = _dtype_of_scales(source, options)
    for tensor in source.tensors:
        if tensor.encoding is None:
            yield [CopyJob(tensor, tensor.dtype, "not quantized")]
        elif is_mxfp4(tensor):
            yield [CopyJob(part, part.dtype, _ENCODED) for part in as_fp8(tensor, block, dtype)]
        elif isinstance(tensor.encoding, Scaled) and tensor.encoding.values.dtype == "F8_E4M3":
            yield _jobs_of_fp8(tensor.encoding, options)
        else:
            raise PlanError.about(
                tensor.file,
                tensor.name,
                f"is {tensor.encoding.name}, which --dtype fp8 does not store without loss; "
                f"--dtype bfloat16 decodes it",
            )


def fp8_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json for experts in FP8.

    `expert_dtype` says so, beside quantization_config as in DeepSeek-V4-Flash-Base, or in it as in
    V4.1: vLLM takes experts for FP4 where it is missing.
    """

    def name_fp8(level: dict[str, Any]) -> None:
        if OF_EXPERTS in level:
            level[OF_EXPERTS] = "fp8"

    edited = at_all_levels(config, name_fp8)
    if edited == config:
        edited[OF_EXPERTS] = "fp8"
    return edited


def _block_of(place: object, source: Source) -> Block:
    """Returns the rows and columns that share a scale; a PlanError if the source has none."""
    found: Mapping[str, Any] = quantization_of(source.config or {}) or {}
    has_mxfp4 = any(is_mxfp4(tensor) for tensor in source.tensors)
    if found.get("quant_method") != "fp8" or not has_mxfp4 or source.adapters:
        raise PlanError(
            f"{place}: --dtype fp8 is for experts in MXFP4 of a model that is in FP8 otherwise, "
            f"such as DeepSeek-V4, without --lora; --dtype bfloat16 decodes others"
        )
    block = found.get("weight_block_size")
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0 and columns % GROUP == 0:
            return rows, columns
    raise PlanError(
        f"{place}: weight_block_size of its config is {block!r:.40}, but FP8 of MXFP4 takes "
        f"blocks whose width is a multiple of {GROUP}; --dtype bfloat16 decodes it"
    )


def _dtype_of_scales(source: Source, options: DequantizeOptions) -> str:
    """Returns the tag of the dtype that scales of experts get: as asked, or as the rest has."""
    if options.fp8_scales is not None:
        return "F32" if options.fp8_scales == "float32" else "F8_E8M0"
    found = set()
    for tensor in source.tensors:
        if isinstance(tensor.encoding, Scaled) and tensor.encoding.scale is not None:
            found.add(tensor.encoding.scale.dtype)
    return "F32" if found == {"F32"} else "F8_E8M0"


def _jobs_of_fp8(encoding: Scaled, options: DequantizeOptions) -> list[CopyJob]:
    """Returns the jobs that copy a weight in FP8, and cast its scales if that is asked for."""
    jobs = [CopyJob(encoding.values, encoding.values.dtype, _KEPT)]
    scale = encoding.scale
    if scale is None:
        return jobs
    dtype = scale.dtype
    if options.fp8_scales == "float32":
        dtype = "F32"
        if scale.dtype == "U8":
            scale = scale._replace(dtype="F8_E8M0")
    elif options.fp8_scales == "e8m0" and dtype not in POWERS_OF_TWO:
        raise PlanError.about(
            scale.file,
            scale.name,
            f"is {dtype}, which E8M0 need not hold; --fp8-scales float32 stores all scales alike",
        )
    jobs.append(CopyJob(scale, dtype, _KEPT))
    return jobs
