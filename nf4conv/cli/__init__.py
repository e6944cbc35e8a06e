"""Reads the command line, calls one function of the public API and prints what it returned.

A command writes its result to stdout and everything else to stderr. Exit codes: 0 done,
1 verification failed, 2 wrong usage or bad input.

program.py      defines the program: its commands in the order of use, and how it handles signals
commands/       holds a module for each command
options.py      declares the options that several commands share
parameters.py   defines the types of arguments and options: sizes, places, dtypes
help.py         shows the options of a command in groups, and examples below them
chosen.py       gathers the options that a user chose, and refuses options without effect
display.py      shows results, notes and progress the way the user asked for
log.py          shows on stderr what the library logs, with --verbose
errors.py       turns every error into one line on stderr and an exit code
"""

from nf4conv.cli.program import main as main
