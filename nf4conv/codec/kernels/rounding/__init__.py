"""The two steps of rounding that knows the activations; codec/rounding/steps.py defines them.

choose.py      chooses the scales of a group together with the ranks of its weights
sweep.py       improves the scales of a group, then its ranks
columns.py     holds inputs of a group in registers, and finds the nearest level
snapping.py    finds the nearest scale that can be stored
"""

from nf4conv.codec.kernels.rounding.choose import round_group as round_group
from nf4conv.codec.kernels.rounding.sweep import sweep_group as sweep_group
