"""Runs nf4conv in a process that lacks what Windows lacks.

Usage: python like_windows.py FILE, where FILE is a JSON list of commands, each a list of words. The
exit code is that of the first command that fails. A word before them, "killed", makes the process
end without a word at its sixth sync of a file.

What Windows has instead (msvcrt, kernel32) is played by stand-ins, and files behave as there: one
that is open is neither renamed nor removed, and a folder is not opened. This proves that nf4conv
calls nothing that Windows lacks. It cannot prove that Windows does what the stand-ins do.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess  # noqa: F401 - takes msvcrt for a sign of Windows, so before the stand-in is there
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # noqa: F401 - it and what it imports know the real system

MODULES = ("fcntl", "resource", "termios", "pwd", "grp")
CALLS = (
    "pread", "preadv", "pwrite", "pwritev", "posix_fadvise", "sched_getaffinity",
    "sched_setaffinity", "sysconf", "geteuid", "getuid", "getegid", "getgid", "O_NOFOLLOW",
    "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "fork", "chown", "mkfifo",
)  # fmt: skip
SIGNALS = ("SIGPIPE", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGALRM")


class Kernel32:
    """Plays the library of Windows that counts memory."""

    def K32GetProcessMemoryInfo(self, _process: object, counters: Any, size: int) -> int:  # noqa: N802
        words = counters._obj
        assert size == ctypes.sizeof(words) == words[0] == 72
        words[1], words[2] = PEAK(), PEAK() - 1
        return 1

    def GlobalMemoryStatusEx(self, status: Any) -> int:  # noqa: N802
        words = status._obj
        assert ctypes.sizeof(words) == words[0] == 64
        words[1] = words[2] = 2**34
        return 1


USAGE = resource.getrusage, resource.RUSAGE_SELF


def PEAK() -> int:  # noqa: N802
    return USAGE[0](USAGE[1]).ru_maxrss * 1024


def make_msvcrt() -> ModuleType:
    """Plays the module by which Windows locks a file."""
    import fcntl

    msvcrt = ModuleType("msvcrt")
    msvcrt.LK_NBLCK = 2  # type: ignore[attr-defined]

    def locking(descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    msvcrt.locking = locking  # type: ignore[attr-defined]
    return msvcrt


def open_files() -> set[str]:
    """Returns the paths of what this process has open."""
    found = set()
    for number in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the list itself, closed by now
            found.add(str(number.readlink()))
    return found


def refuse_if_open(*paths: Any) -> None:
    for path in paths:
        if os.path.realpath(path) in open_files():
            raise PermissionError(13, "is being used by another process", str(path))


class Status:
    """Is the status of a file without the count of its blocks."""

    def __init__(self, status: os.stat_result) -> None:
        self._status = status

    def __getattr__(self, name: str) -> Any:
        if name == "st_blocks":
            raise AttributeError(name)
        return getattr(self._status, name)


def behave() -> None:
    """Makes files behave as on Windows."""
    replace, unlink, opening, stat = os.replace, os.unlink, os.open, Path.stat

    def guarded_replace(source: Any, target: Any) -> None:
        refuse_if_open(source, target)
        replace(source, target)

    def guarded_unlink(path: Any) -> None:
        refuse_if_open(path)
        unlink(path)

    def guarded_open(path: Any, flags: int, mode: int = 0o777) -> int:
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, flags, mode)

    os.replace = guarded_replace
    os.unlink = guarded_unlink
    os.remove = guarded_unlink
    os.open = guarded_open  # type: ignore[assignment]
    Path.stat = lambda path, **options: Status(stat(path, **options))  # type: ignore[assignment,method-assign]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]


def hide() -> None:
    """Hides what Windows lacks from all that is imported from now on."""
    sys.modules["msvcrt"] = make_msvcrt()
    library = ctypes.CDLL

    def load(name: str | None, *more: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith("nf4conv"):
            return library(name, *more, **options)
        if name is None:
            raise TypeError("argument of type 'NoneType' is not iterable")
        if name == "kernel32":
            return Kernel32()
        return library("libc.so.6" if name == "msvcrt" else name)

    ctypes.CDLL = load  # type: ignore[assignment,misc]
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in CALLS:
        delattr(os, name)
    for name in SIGNALS:
        delattr(signal, name)
    signal.SIGBREAK = 21  # type: ignore[attr-defined]


def end_at_sync(last: int) -> None:
    """Ends the process at a sync of a file, as if it were killed."""
    fsync, left = os.fsync, [last]

    def counted(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)
        fsync(descriptor)

    os.fsync = counted  # type: ignore[assignment]


def main() -> int:
    commands = json.loads(Path(sys.argv[-1]).read_text())
    behave()
    hide()
    if "killed" in sys.argv:
        end_at_sync(6)
    from nf4conv.__main__ import run
    from nf4conv.cli import main as nf4conv
    from nf4conv.system import signals
    from nf4conv.system.machine import IS_POSIX

    assert not IS_POSIX
    assert callable(run)
    assert signals.WORDS[21] == "stopped"
    signals.handle_end(signal.default_int_handler)
    for words in commands:
        print("$", *words, flush=True)
        try:
            nf4conv(words, standalone_mode=False)
        except SystemExit as end:
            if end.code:
                return int(end.code)
    assert "nf4conv.run.loop" in sys.modules
    return 0


if __name__ == "__main__":
    sys.exit(main())
