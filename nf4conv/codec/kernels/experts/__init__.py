"""Kernels for the experts of mixtures, which lie packed in stacks, one projection of a layer each.

stacks.py    reads codes and scales of a stack: what all of them share
rows.py      multiplies one row with each expert that it chose: few tokens
wide.py      the same on Hopper, by tensor cores
groups.py    multiplies groups of rows that chose the same expert: more tokens
grouping.py  finds these groups, where an expert has one
active.py    decodes the experts that are used, into the layout that a grouped product wants
"""
