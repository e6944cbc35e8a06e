"""Reads torch pickles, of which nothing is executed.

header.py    finds the tensors of a file and where their bytes are
program.py   runs the pickle in a file on a machine that can call nothing
values.py    checks and combines what a pickle describes
names.py     lists every name that a pickle of a state dict may use
"""
