"""Holds everything that depends on the operating system, and nothing else.

Each function means the same on Linux, macOS and Windows, and says where a system gives less. No
module outside this room names a call that one of them lacks (tests/test_layering.py).

kind.py         says which kind of system this is, and what it lacks
files.py        reads and writes at positions, syncs, drops cached pages, counts bytes on disk
removal.py      removes what is in a folder, and follows no link to reach it
names.py        says which file names a folder cannot take
locking.py      locks a file for one process at a time
private.py      reads a file that nobody but this user could have written
memory.py       measures memory, of the machine and of this process, and compares it
garbage.py      does without Python's collection of garbage for a while
cores.py        finds the cores that this process may use, keeps to some of them, may fork
signals.py      handles the signals that end a command, and output that nobody reads any more
libraries.py    loads libraries of the system: that of C, and the CUDA driver
background.py   runs threads that a command waits for, or leaves behind, however it ends
"""
