"""x · Wᵀ for 33 to 512 rows on Hopper, in panels of 128 or 256 rows of W.

A program computes such a panel for `columns` rows of x, over all k or one of several parts of it.
For few rows of x it scales sums, and rounds only the 16 values to the dtype of x. For more it
scales and rounds weights. Then in float16 the result is that of a product with decoded weights, but
for the order of float32 sums. In bfloat16 the 16 values are rounded to float16 before they are
scaled: as decoded weights are rounded to a grid eight times as coarse, this adds 0.4 % to their
error.

plans.py           says what a program computes, and chooses how a product is divided
prepare.py         prepares a product: finds once what its calls need
maps.py            describes x to the unit that copies tiles
kernels.py         computes tiles of the result
scaled_sums.py     the loop of a program over k that scales sums, as PTX
scaled_weights.py  the loop of a program over k that scales weights, as PTX
assembly.py        what both loops have in common, as PTX
decoding.py        loads and decodes weights, as PTX
transposing.py     exchanges bytes of codes between lanes, as PTX
tiles.py           copies tiles of x, as PTX
sums.py            adds up and stores the sums of a cluster
inputs.py          names the inputs of the loops
"""
