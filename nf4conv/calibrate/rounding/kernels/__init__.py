"""The two steps of rounding that knows the activations; rounding/steps.py defines them."""

from nf4conv.calibrate.rounding.kernels.choose import round_group as round_group
from nf4conv.calibrate.rounding.kernels.sweep import sweep_group as sweep_group
