"""Reads the command line, calls one function of the public API and prints what it returned.

A command writes its result to stdout and everything else to stderr. Exit codes: 0 done,
1 verification failed, 2 wrong usage or bad input.

program.py      defines the program: its commands in the order of use, and how it handles signals
errors.py       turns every error into one line on stderr and an exit code
parameters.py   defines the types of arguments and options: sizes, places, dtypes
help.py         shows the options of a command in groups, and examples below them
options.py      declares the options that several commands share
display.py      shows results, notes and progress the way the user asked for

Each of the other modules holds the command of its name:
inspect.py      shows what a checkpoint holds
quantize.py     quantizes a checkpoint
verify.py       verifies a 4-bit checkpoint
compare.py      compares two checkpoints
evaluate.py     compares the predictions of two models
dequantize.py   decodes a 4-bit checkpoint
finish.py       completes an output folder that several runs have filled
env.py          shows versions and the compute engine
completion.py   prints the script with which a shell completes commands
"""

from nf4conv.cli.program import main as main
