"""The rows of results: one tensor, or one kind of module. Their fields are the keys of --json.

The rows of a plan are in plan/rows.py.

figures.py      names formats, and computes errors and decibels from sums
weights.py      describes what verification measured of each packed weight
comparison.py   describes how each pair of tensors compares
inspection.py   describes each tensor of a checkpoint
"""
