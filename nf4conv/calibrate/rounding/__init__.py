"""Rounds weights to 4 bits with knowledge of the activations: docs/quality.md explains it."""

from nf4conv.calibrate.rounding.calibrated import round_calibrated as round_calibrated
from nf4conv.calibrate.rounding.factor import Factor as Factor
from nf4conv.calibrate.rounding.factor import factor as factor
from nf4conv.calibrate.rounding.rounded import Rounded as Rounded
from nf4conv.calibrate.rounding.rounded import layer_cost as layer_cost
from nf4conv.calibrate.rounding.rounded import relative_error as relative_error
from nf4conv.calibrate.rounding.rounded import search as search
from nf4conv.calibrate.rounding.two_sided import OUTPUT_DAMPING as OUTPUT_DAMPING
from nf4conv.calibrate.rounding.two_sided import round_two_sided as round_two_sided
from nf4conv.calibrate.rounding.two_sided import two_sided_cost as two_sided_cost
