"""Fills an output folder from several processes, each with its part of the shards.

A part is a resume of some shards: it makes those that are not there, and records them. Whoever
finds all shards there writes the last files. The processes may run on any hosts that share the
folder.

    OUT/.nf4conv/run.json            what all parts make, written by the one that came first
    OUT/.nf4conv/shards/NAME.json    a record of each finished shard, see FinishedFile
    OUT/.nf4conv/HOST.PID.RANDOM     what one process is writing or fetching; left behind if it is
                                     killed
    OUT/*.safetensors                finished shards
    OUT/tokenizer.json …             what is copied beside the weights by the part that comes first,
                                     so that nobody needs the source at the end

No lock, clock, inode number or time of change is used, for hosts do not share them. Two things are
relied on: a rename is atomic, and a link is not made where a file is. Where there are no links, two
first parts may both take theirs for the plan of all. Every record of a shard names its plan, so
nobody finds all shards of either.

Two processes may write the last files at the same time. They write the same bytes, each file under
a name that is its own until the file is whole.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nf4conv.errors import OutputError, named
from nf4conv.output.folder import OutputFolder, as_json, require_same_run
from nf4conv.output.writer import write_file
from nf4conv.plan.jobs import Plan
from nf4conv.sources.reader import digest_of, read_chunks
from nf4conv.sources.record import MAKING
from nf4conv.sources.unfinished import LAST_FILES, RECORD, SHARDS, WORK_FOLDER
from nf4conv.system.folders import remove


class SharedFolder(OutputFolder):
    """Holds an output folder that others fill too; use it as a context manager."""

    def __init__(self, out: Path) -> None:
        name = f"{socket.gethostname()[:60]}.{os.getpid()}.{os.urandom(8).hex()}"
        super().__init__(out, out / WORK_FOLDER / name)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            remove(self.out, WORK_FOLDER, self._private.name)

    def join(self, plan: Mapping[str, Any], auxiliary: Path, part: Plan) -> None:
        """Takes part in a plan. Shards of this part that are finished and intact are kept."""
        copies: Mapping[str, str] = plan[LAST_FILES]["auxiliary"]
        with named(self.out, OutputError, inside=True):
            self.check_occupied(overwrite=False)
            if not self.out.is_dir() or not any(self.out.iterdir()):
                self._work.mkdir(parents=True, exist_ok=True)
            self._private.mkdir()
            self._publish(json.dumps({"fingerprint": plan}).encode())
            advice = "all parts take the same command and source; choose another folder for others"
            require_same_run(self.out, self.read_run(), as_json(plan), advice)
            (self._work / SHARDS).mkdir(exist_ok=True)
            for name, digest in copies.items():
                copy = self.out / name
                if not copy.is_file() or digest_of(copy) != digest:
                    self.write(name, read_chunks(auxiliary / name))
        self.finished = self.intact(self.known(shard.name for shard in part.shards))

    def _publish(self, content: bytes) -> None:
        """Makes `content` that of run.json, unless there is one."""
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

    def take_all(self, names: Sequence[str], *, reread: bool) -> int:
        """Takes over the shards of others, if all are there; returns how many are missing.

        With `reread` they are read, and their checksums compared.
        """
        known = self.known(names)
        if len(known) < len(names):
            return len(names) - len(known)
        others = {name: file for name, file in known.items() if name not in self.finished}
        damaged = others.keys() - self.intact(others) if reread else set()
        if damaged:
            raise OutputError(
                f"{self.out}: {len(damaged):,} of {len(known):,} files are not what was written, "
                f"such as {min(damaged)}; the same command without --part makes them again",
                path=self.out,
            )
        self.finished = known
        with named(self.out, OutputError, inside=True):
            self._private.mkdir(exist_ok=True)
        return 0
