"""Puts finished blocks in the place of the weights that they were made from.

The ordinary run then copies their components, as it does with those of a source in 4 bits.
"""

import struct
from collections.abc import Mapping
from dataclasses import replace

from nf4conv.calibrate.kept import names_of_components
from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.unchanged import Stored
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP
from nf4conv.format.dtypes import TAGS
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format, nested_offset_of, parse_quant_state
from nf4conv.plan.jobs import Job, PackJob
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.reader import read_bytes
from nf4conv.sources.tensors import TensorInfo


def with_calibrated_weights(
    plan: QuantizationPlan, components: Mapping[str, TensorInfo]
) -> QuantizationPlan:
    """Returns a plan whose calibrated weights are copied from finished blocks.

    `components` says where the components of all these weights are, by their names.
    """
    format = plan.output.format

    def finished_job(job: Job) -> Job:
        if isinstance(job, PackJob) and job.original is not None:
            return _copied(job, format, components)
        return job

    return replace(plan, output=plan.output.with_jobs(finished_job))


def _copied(job: PackJob, format: Format, components: Mapping[str, TensorInfo]) -> PackJob:
    """Returns a job that copies a weight from the finished block that holds it."""
    names = names_of_components(job.name, format, job.matrix.shape)
    parts = {suffix: components[name] for suffix, name in names.items()}
    blob_suffix = f"{QUANT_STATE_PREFIX}{format.quant_type}"
    blob = read_bytes(parts[blob_suffix])
    offset = nested_offset_of(parse_quant_state(blob)) if format.double_quant else 0.0
    encoding = Bitsandbytes4bit(
        values=parts[""],
        absmax=parts["absmax"],
        quant_map=parts["quant_map"],
        nested_absmax=parts.get("nested_absmax"),
        nested_quant_map=parts.get("nested_quant_map"),
        quant_state=parts[blob_suffix],
        quant_type=format.quant_type,
        blocksize=format.blocksize,
        dtype=TAGS[format.dtype],
        nested_offset=offset,
    )
    values = parts[""]
    source = TensorInfo(
        job.name,
        TAGS[format.dtype],
        job.matrix.shape,
        values.file,
        values.start,
        values.stop,
        encoding,
    )
    copied: list[TensorInfo | bytes] = [values, parts["absmax"]]
    copied.append(struct.pack("<16f", *CODEBOOKS[format.quant_type].values))
    if format.double_quant:
        copied.append(parts["nested_absmax"])
        copied.append(struct.pack(f"<{len(DYNAMIC_MAP)}f", *DYNAMIC_MAP))
    return replace(
        job,
        source=source,
        matrix=PackedMatrix(job.name, job.matrix.shape),
        stored=Stored(tuple(copied), blob, "calibrated"),
    )
