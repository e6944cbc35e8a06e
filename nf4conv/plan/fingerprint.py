"""Tells plans apart: only a run that would write the same bytes resumes an interrupted run."""

import hashlib
from collections.abc import Collection
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nf4conv.declaring import deciding, typed
from nf4conv.errors import SourceError
from nf4conv.options import RunOptions, WritingOptions
from nf4conv.plan.jobs import Plan
from nf4conv.plan.writing import WritingPlan
from nf4conv.sources.reader import digest_of
from nf4conv.sources.record import MAKING
from nf4conv.sources.source import Source, source_stamps, stamps_of
from nf4conv.sources.unfinished import LAST_FILES
from nf4conv.version import __version__


def fingerprint(plan: WritingPlan, device: str) -> dict[str, Any]:
    """Returns whatever decides the bytes of a result, as JSON values."""
    found = {
        "command": plan.options.command,
        "version": __version__,
        "torch": version("torch"),
        "device": device.partition(":")[0],
        "source files": source_stamps(plan.source),
        "source headers": plan.record["source"]["headers_sha256"],
        "source config": plan.source.config,
        "adapters": [[str(adapter), adapter.config] for adapter in plan.source.adapters],
        **named_options(plan.options),
        "plan": plan_fingerprint(plan.whole),
    }
    if plan.calibration is not None:
        found["calibration"] = plan.calibration.described
        found["transformers"] = plan.calibration.transformers
    return found


def named_options(options: WritingOptions) -> dict[str, Any]:
    """Returns the options that decide what is made, by their names on the command line."""
    named = {typed(name): value for name, value in deciding(options).items()}
    named.pop("--calibrate", None)  # a path; the plan has the digest of the text
    return named


def shared_fingerprint(
    plan: WritingPlan, run: RunOptions, device: str, card: str | None
) -> dict[str, Any]:
    """Returns what all parts of a run agree on, as JSON values.

    It holds all that decides the bytes, and all that the last files are made of: the source may be
    out of reach when they are written.
    """
    source = plan.source
    with source.whole_folder() as folder:
        auxiliary = {str(name): digest_of(folder / name) for name in source.auxiliary}
    config = plan.config_bytes
    last = {
        "shards": [shard.name for shard in plan.whole.shards],
        "auxiliary": auxiliary,
        "stem": source.stem,
        "config.json": None if config is None else config.decode(),
        "model card": card,
        MAKING: plan.record,
        "bytes": sum(tensor.nbytes for tensor in source.tensors),
        "totals": asdict(replace(plan, output=plan.whole, part=None).totals),
    }
    return {
        **fingerprint(plan, device),
        "--verify": run.verify,
        "--tolerance": run.tolerance,
        # times differ between hosts, and paths of adapters may
        "source files": {name: stamp[:1] for name, stamp in source_stamps(source).items()},
        "adapters": None,
        "--lora": None,
        "source": plan.record["source"],
        LAST_FILES: last,
    }


def require_unchanged(source: Source, what: str, files: Collection[Path] | None = None) -> None:
    """Checks that a source is what it was when it was planned."""
    watched = [file for file in source.stamps if files is None or file in files]
    for file, stamp in stamps_of(watched).items():
        if stamp != source.stamps[file]:
            raise SourceError(f"{file}: changed {what}", path=file)


def plan_fingerprint(output: Plan) -> str:
    """Returns a digest of what becomes of each tensor, and of the file that it goes to.

    A run that resumes decides anew, and must decide alike.
    """
    digest = hashlib.sha256()
    for shard in output.shards:
        digest.update(repr((shard.name, [(job.name, job.nbytes) for job in shard.jobs])).encode())
    return digest.hexdigest()
