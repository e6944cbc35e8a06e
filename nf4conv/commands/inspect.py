"""`nf4conv inspect`: what is in a checkpoint or diffusers pipeline, by its headers."""

from dataclasses import replace
from pathlib import Path

from nf4conv.checkpoint.diffusers_folder import open_diffusers
from nf4conv.commands.single.inspect import inspect_one
from nf4conv.errors import DiffusersFolderError
from nf4conv.options import SourceOptions
from nf4conv.report.loading import gpu_bytes
from nf4conv.report.results import Inspection
from nf4conv.report.rows import InspectionTotals, inside


def inspect_checkpoint(path: str | Path, where: SourceOptions | None = None) -> Inspection:
    """Describe a checkpoint, or a diffusers pipeline, without reading its weights; torch is not imported.

    Args:
        path: a folder, a weight file, or "org/name" on the Hugging Face Hub.
        where: of a model on the Hub.

    Returns:
        One result; of a diffusers pipeline, names have the submodel in front.

    Raises:
        SourceError: it cannot be read.
    """
    try:
        return inspect_one(path, where)
    except DiffusersFolderError:
        folder = open_diffusers(path, where)
    parts = {name: inspect_one(folder.place, place) for name, place in folder.submodels.items()}
    rows = tuple(inside(name, row) for name, part in parts.items() for row in part.tensors)
    return Inspection(
        path=str(path),
        files=tuple(f"{name}/{file}" for name, part in parts.items() for file in part.files),
        config=next((part.config for part in parts.values() if part.config is not None), None),
        model_type=None,
        made=next((part.made for part in parts.values() if part.made is not None), None),
        notes=tuple(f"{name}/{note}" for name, part in parts.items() for note in part.notes),
        gpu_bytes=gpu_bytes(sum(row.bytes for row in rows)),
        tensors=rows,
        kinds=tuple(inside(name, row) for name, part in parts.items() for row in part.kinds),
        totals=InspectionTotals.of(rows),
        findings=tuple(
            replace(found, file=f"{name}/{found.file}") for name, part in parts.items() for found in part.findings
        ),
    )
