"""A checkpoint with the adapters that the user names merged into it."""

from collections.abc import Sequence
from pathlib import Path

from nf4conv.checkpoint.adapter import open_adapter
from nf4conv.checkpoint.merging import merge
from nf4conv.checkpoint.source import Source, open_source
from nf4conv.errors import DiffusersFolderError, PlanError, SourceError
from nf4conv.options import SourceOptions


def open_merged(source: str | Path, where: SourceOptions | None, lora: Sequence[str]) -> Source:
    """Open a checkpoint, and merge adapters into what is read of it.

    Where our rules do not find a module of an adapter on disk, the installed transformers is asked, if there is one.

    Raises:
        SourceError: the checkpoint or an adapter cannot be read, or they do not go together.
        PlanError: adapters for a diffusers pipeline.
    """
    if not lora:
        return open_source(source, where)
    try:
        opened = open_source(source, where)
    except DiffusersFolderError as error:
        raise PlanError(f"{source}: --lora is for one part of a diffusers pipeline: --subfolder transformer") from error
    adapters = [open_adapter(place, where) for place in lora]
    try:
        return merge(opened, adapters)
    except SourceError:
        from nf4conv.commands.skeleton import paths_in_memory  # importing transformers takes seconds

        known = paths_in_memory(opened.tensors, opened.config)
        if not known:
            raise
        return merge(opened, adapters, known)
