"""Matches the tensors of a decoded checkpoint with those that the plan of its decoding makes."""

from nf4conv.check.pairing import CopiedPair, Pairs, is_dispensable
from nf4conv.plan.dequantization import DequantizationPlan
from nf4conv.plan.jobs import CopyJob
from nf4conv.sources.stored_weights import Structure


def pair_decoded(structure: Structure, plan: DequantizationPlan) -> Pairs:
    """Finds what each tensor is decoded or copied from, and notes those that are not as planned.

    Args:
        structure: the checkpoint.
        plan: of decoding its source in the same way.

    Returns:
        The pairs of tensors whose names, dtypes and shapes are right. Only their values are left to
        be compared.
    """
    copies = []
    planned = set()
    for job in plan.output.jobs:
        assert isinstance(job, CopyJob)
        planned.add(job.name)
        found = structure.tensors.get(job.name)
        shape = job.source.shape
        if found is None:
            _note_missing(structure, job, plan)
        elif (found.dtype, found.shape) != (job.dtype, shape):
            text = (
                f"is {found.dtype} {list(found.shape)}, "
                f"but decoding the source gives {job.dtype} {list(shape)}"
            )
            structure.note("copies", found.file, job.name, text)
        else:
            copies.append(CopiedPair(found, job.source))
    for name, tensor in structure.tensors.items():
        if name not in planned:
            structure.note("names", tensor.file, name, "is not in the source")
    return Pairs(copies=tuple(copies))


def _note_missing(structure: Structure, job: CopyJob, plan: DequantizationPlan) -> None:
    """Notes a tensor that is not there. Other tools leave out what is not needed."""
    is_fault = structure.record is not None or not is_dispensable(job.name, plan.config or {})
    text = "is in the source but not here"
    structure.note("names", job.source.file, job.name, text, is_fault=is_fault)
