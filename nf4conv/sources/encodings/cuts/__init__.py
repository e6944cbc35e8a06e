"""Cuts tensors, encoded or not, so that each piece can be read and decoded alone.

pieces.py        cuts tensors into pieces of a size
rows.py          cuts rows out of a matrix, or a matrix out of a stack
packed_runs.py   cuts runs of elements out of weights that bitsandbytes packed
integer_rows.py  cuts rows out of weights of packed integers
lines.py         cuts tensors that are stored as they are
"""
