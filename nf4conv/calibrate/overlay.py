"""Puts finished blocks in the place of the weights that they were made from.

The ordinary run then copies their components, as it does with those of a source in 4 bits.
"""

from collections.abc import Mapping
from dataclasses import replace

from nf4conv.calibrate.kept import names_of_components
from nf4conv.choose.decisions import PackedMatrix
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format, parse_quant_state
from nf4conv.plan.jobs import Job, PackJob
from nf4conv.plan.quantization import QuantizationPlan
from nf4conv.sources.foreign.bitsandbytes import as_written_anew, described_weight
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
    values = parts.pop("")
    blob = read_bytes(parts[f"{QUANT_STATE_PREFIX}{format.quant_type}"])
    fields = parse_quant_state(blob, format.double_quant)
    encoding = described_weight(values, parts, fields, "calibrated")
    source = TensorInfo(
        job.name,
        encoding.dtype,
        job.matrix.shape,
        values.file,
        values.start,
        values.stop,
        encoding,
    )
    return replace(
        job,
        source=source,
        matrix=PackedMatrix(job.name, job.matrix.shape),
        stored=as_written_anew(encoding),
    )
