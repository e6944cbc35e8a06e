"""Reads the command line, calls one function of the public API and prints what it returned.

A command writes its result to stdout and everything else to stderr. Exit codes: 0 done,
1 verification failed, 2 wrong usage or bad input.
"""

from nf4conv.cli.program import main as main
