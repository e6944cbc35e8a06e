"""An output folder that several processes fill, each with its part of the shards, on any hosts that
share it.

    OUT/.nf4conv/run.json            what all parts make, written by the one that came first
    OUT/.nf4conv/auxiliary           what is copied beside the weights, so that nobody needs the source at the end
    OUT/.nf4conv/shards/NAME.json    of each finished shard, see FinishedFile
    OUT/.nf4conv/HOST.PID.RANDOM     what one process is writing or fetching; left behind if it is killed
    OUT/*.safetensors                finished shards

No lock, clock, inode number or time of change is asked, for hosts do not share them. What is relied
on: a rename is atomic, and a link is not made where a file is. Where there are no links, two first
parts may both take theirs for the plan of all; every record of a shard names its plan, so `finish`
refuses what came of the other.
"""

import json
import os
import shutil
import socket
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from nf4conv.errors import OutputError, named
from nf4conv.output.workspace import OutputFolder, compare, short
from nf4conv.output.writer import write_file
from nf4conv.plan.jobs import Plan
from nf4conv.sources.reader import digest_of, read_chunks
from nf4conv.sources.record import MAKING
from nf4conv.sources.unfinished import PARTS, RECORD, SHARDS, WORK_FOLDER

_AUXILIARY: Final = "auxiliary"


class SharedFolder(OutputFolder):
    """An output folder that others fill too; use it as a context manager.

    Raises:
        OutputError: it holds something else, a run that is not in parts, or other parts.
    """

    def __init__(self, out: Path) -> None:
        name = f"{socket.gethostname()[:60]}.{os.getpid()}.{os.urandom(8).hex()}"
        super().__init__(out, out / WORK_FOLDER / name, checksum=False)

    def __enter__(self) -> "SharedFolder":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._private, ignore_errors=True)

    def join(self, plan: Mapping[str, Any], auxiliary: Path, part: Plan) -> None:
        """Take part in a plan, as JSON values; those of this `part`'s shards that are finished are
        kept if intact.

        The digests of the files to copy from the folder `auxiliary` are in the plan, by name.
        """
        with named(self.out, OutputError, inside=True):
            self.check_occupied(overwrite=False)
            if not self.out.is_dir() or not any(self.out.iterdir()):
                self._work.mkdir(parents=True, exist_ok=True)
            self._private.mkdir()
            self._publish(json.dumps({"fingerprint": plan, "stamps": None}).encode())
            advice = "all parts take the same command and source; choose another folder for others"
            compare(self.out, self.read_plan(), json.loads(json.dumps(plan)), advice)
            for folder in (SHARDS, _AUXILIARY):
                (self._work / folder).mkdir(exist_ok=True)
            for name, digest in plan[_AUXILIARY].items():
                self._stage(auxiliary / name, self._work / _AUXILIARY / digest)
        self.finished = self.intact(self.known(shard.name for shard in part.shards))

    def _publish(self, content: bytes) -> None:
        """Make the content that of run.json, unless there is one."""
        draft, path = self._private / RECORD, self._work / RECORD
        write_file(draft, [content])
        try:
            os.link(draft, path)
        except FileExistsError:
            return
        except OSError:  # there are no links here
            if path.exists():
                return
            draft.replace(path)
        if (self.out / MAKING).exists():  # it has been finished since this process looked
            path.unlink()
            raise OutputError(f"{self.out}: exists and is not empty; choose another folder")

    def read_plan(self) -> dict[str, Any]:
        """The plan that all parts are held to; an OutputError if this run is not one in parts."""
        plan: dict[str, Any] = self.read_run()["fingerprint"]
        if PARTS not in plan:
            raise OutputError(
                f"{self.out}: holds an unfinished run that is not in parts; resume it as it was "
                f"begun"
            )
        names = map(PurePosixPath, (*plan[SHARDS], *plan[_AUXILIARY], plan["stem"]))
        if any(name.is_absolute() or ".." in name.parts for name in names):
            raise OutputError(
                f"{self.out}: its {RECORD} names files outside it; that is none of ours"
            )
        self._checksum = plan["--checksum"]
        return plan

    def _stage(self, source: Path, copy: Path) -> None:
        """Copy a file under its digest, unless another part has."""
        if not copy.is_file():
            write_file(copy, read_chunks(source), folder=self._private)
            if digest_of(copy) != copy.name:
                raise OutputError(f"{source}: changed while it was read; run again")

    def collect(self, plan: Mapping[str, Any], reread: bool) -> None:
        """Take all shards of a plan, and copy what belongs beside them; an OutputError says what is
        missing.
        """
        known = self.known(plan[SHARDS])
        self._require(plan, known, "missing")
        self.finished = self.intact(known) if reread else known
        self._require(plan, self.finished, "not what was written")
        with named(self.out, OutputError, inside=True):
            self._private.mkdir()
        for name, digest in plan[_AUXILIARY].items():
            staged = self._work / _AUXILIARY / digest
            self.copy(name, staged)
            if self._written[name] != digest:
                staged.unlink()
                raise OutputError(
                    f"{self.out}/{name}: not what was written; run any of the parts again"
                )

    def _require(self, plan: Mapping[str, Any], found: Collection[str], how: str) -> None:
        lost = plan[SHARDS].keys() - found
        if lost:
            parts = short(sorted({plan[SHARDS][name] for name in lost}))
            what = f"{len(lost):,} of {len(plan[SHARDS]):,} files are {how}, such as {min(lost)}"
            raise OutputError(
                f"{self.out}: {what}; run these parts of {plan[PARTS]}, and then this again: "
                f"{parts}"
            )
