"""x · Wᵀ for 33 to 512 rows on Hopper, in panels of 128 or 256 rows of W.

A program computes such a panel for `columns` rows of x, over all k or one of several parts of it.
For few rows of x it scales sums, and rounds only the 16 values to the dtype of x. For more it
scales and rounds weights. Then in float16 the result is that of a product with decoded weights, but
for the order of float32 sums. In bfloat16 the 16 values are rounded to float16 before they are
scaled: as decoded weights are rounded to a grid eight times as coarse, this adds 0.4 % to their
error.
"""
