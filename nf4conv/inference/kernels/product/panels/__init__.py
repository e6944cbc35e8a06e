"""x · Wᵀ for 33 to 512 rows on Hopper, in panels of 128 or 256 rows of W: plans.py says how."""
