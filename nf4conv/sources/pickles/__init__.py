"""Torch pickles, read without executing anything.

header.py    finds the tensors of a pickle and where their bytes are
program.py   interprets the few opcodes that torch writes
"""
