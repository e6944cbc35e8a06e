"""Fills an output folder from several processes, each with its part of the shards.

The processes may run on any hosts that share the folder.

    OUT/.nf4conv/run.json            what all parts make, written by the one that came first
    OUT/.nf4conv/auxiliary           what is copied beside the weights, so that nobody needs the
                                     source at the end
    OUT/.nf4conv/shards/NAME.json    a record of each finished shard, see FinishedFile
    OUT/.nf4conv/HOST.PID.RANDOM     what one process is writing or fetching; left behind if it is
                                     killed
    OUT/*.safetensors                finished shards

No lock, clock, inode number or time of change is used, for hosts do not share them. Two things are
relied on: a rename is atomic, and a link is not made where a file is. Where there are no links, two
first parts may both take theirs for the plan of all. Every record of a shard names its plan, so
`finish` refuses what came of the other.
"""

import json
import os
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nf4conv.errors import OutputError, named
from nf4conv.output.fingerprints import as_json, require_same_run, shortened
from nf4conv.output.folder import OutputFolder
from nf4conv.output.shared_plan import AUXILIARY, check_shared_plan
from nf4conv.output.writer import write_file
from nf4conv.plan.jobs import Plan
from nf4conv.sources.reader import digest_of, read_chunks
from nf4conv.sources.record import MAKING
from nf4conv.sources.unfinished import PARTS, RECORD, SHARDS, WORK_FOLDER
from nf4conv.system.removal import remove


class SharedFolder(OutputFolder):
    """Holds an output folder that others fill too; use it as a context manager.

    Args:
        out: the folder.
    """

    def __init__(self, out: Path) -> None:
        name = f"{socket.gethostname()[:60]}.{os.getpid()}.{os.urandom(8).hex()}"
        super().__init__(out, out / WORK_FOLDER / name, checksum=False)

    def __enter__(self) -> "SharedFolder":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            remove(self.out, WORK_FOLDER, self._private.name)

    def join(self, plan: Mapping[str, Any], auxiliary: Path, part: Plan) -> None:
        """Takes part in a plan. Shards of this part that are finished and intact are kept.

        Args:
            plan: the fingerprint of what all parts make, as JSON values. It holds the digests of
                the files to copy, by name.
            auxiliary: the folder that has these files.
            part: what this process makes.

        Raises:
            OutputError: the folder holds something else, a run that is not in parts, or parts of
                another plan.
        """
        with named(self.out, OutputError, inside=True):
            self.check_occupied(overwrite=False)
            if not self.out.is_dir() or not any(self.out.iterdir()):
                self._work.mkdir(parents=True, exist_ok=True)
            self._private.mkdir()
            self._publish(json.dumps({"fingerprint": plan, "stamps": None}).encode())
            advice = "all parts take the same command and source; choose another folder for others"
            require_same_run(self.out, self.read_plan(), as_json(plan), advice)
            (self._work / SHARDS).mkdir(exist_ok=True)
            (self._work / AUXILIARY).mkdir(exist_ok=True)
            for name in plan[AUXILIARY]:
                self.require_name(name)
            for name, digest in plan[AUXILIARY].items():
                self._stage(auxiliary / name, self._work / AUXILIARY / digest)
        self.finished = self.intact(self.known(shard.name for shard in part.shards))

    def _publish(self, content: bytes) -> None:
        """Makes `content` that of run.json, unless there is one.

        Raises:
            OutputError: the folder has been finished since this process looked.
        """
        draft = self._private / RECORD
        path = self._work / RECORD
        write_file(draft, [content])
        try:
            os.link(draft, path)
        except FileExistsError:
            return
        except OSError:  # there are no links here
            if path.exists():
                return
            draft.replace(path)
        if (self.out / MAKING).exists():
            remove(self.out, WORK_FOLDER, RECORD)
            raise OutputError(
                f"{self.out}: exists and is not empty; choose another folder", path=self.out
            )

    def read_plan(self) -> dict[str, Any]:
        """Reads the plan that all parts are held to, as JSON values.

        Raises:
            OutputError: the run in this folder is not one in parts, or its plan is damaged.
        """
        plan = self.read_run().fingerprint
        if PARTS not in plan:
            raise OutputError(
                f"{self.out}: holds an unfinished run that is not in parts; resume it as it was "
                f"begun",
                path=self.out,
            )
        check_shared_plan(self.out, plan)
        self._checksum = plan["--checksum"]
        return plan

    def _stage(self, source: Path, copy: Path) -> None:
        """Copies a file to one that is named by its digest, unless another part has.

        Raises:
            OutputError: the source is not what it was when it was planned.
        """
        if copy.is_file():
            return
        write_file(copy, read_chunks(source), folder=self._private)
        if digest_of(copy) != copy.name:
            raise OutputError(f"{source}: changed while it was read; run again", path=source)

    def collect(self, plan: Mapping[str, Any], reread: bool) -> None:
        """Takes over all shards of a plan, and copies what belongs beside them.

        Args:
            plan: the plan, as `read_plan` gives it.
            reread: whether to read every shard and compare its checksum.

        Raises:
            OutputError: shards or other files are missing or damaged; it says which parts to run.
        """
        known = self.known(plan[SHARDS])
        self._require(plan, known, "missing")
        self.finished = self.intact(known) if reread else known
        self._require(plan, self.finished, "not what was written")
        with named(self.out, OutputError, inside=True):
            self._private.mkdir()
        for name, digest in plan[AUXILIARY].items():
            staged = self._work / AUXILIARY / digest
            self.require_name(name)
            self.copy(name, staged)
            if self._written[name] != digest:
                remove(self.out, WORK_FOLDER, AUXILIARY, digest)
                path = self.out / name
                raise OutputError(
                    f"{path}: not what was written; run any of the parts again", path=path
                )

    def _require(self, plan: Mapping[str, Any], found: Collection[str], how: str) -> None:
        """Checks that all shards of a plan are among those that were found.

        Raises:
            OutputError: some are not; `how` says what is wrong with them.
        """
        lost = plan[SHARDS].keys() - found
        if lost:
            parts = shortened(sorted({plan[SHARDS][name] for name in lost}))
            what = f"{len(lost):,} of {len(plan[SHARDS]):,} files are {how}, such as {min(lost)}"
            raise OutputError(
                f"{self.out}: {what}; run these parts of {plan[PARTS]}, and then this again: "
                f"{parts}",
                path=self.out,
            )
