"""No class of diffusers gets a checkpoint that it cannot load, and what stays in 16 bits stays for
a known reason.
"""

import pytest
from every_class import classes, plan

pytestmark = pytest.mark.architectures

DELIBERATE = {
    "outside the blocks of a diffusion model",
    "a loader could not tell its name from that of a skipped module",
    "a router",
    "loaders do not take this weight of the family in 4 bits",
    "fewer than 32 rows",
    "nn.MultiheadAttention reads this weight directly",
}


def test_every_class_is_packed_where_diffusers_expects_it(subtests):
    for kind in classes():
        with subtests.test(kind.__name__):
            found = plan(kind)
            assert found.packed == found.replaced
            assert set(found.reasons.values()) <= DELIBERATE
