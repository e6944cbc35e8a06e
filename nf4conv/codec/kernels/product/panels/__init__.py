"""x · Wᵀ for 33 to 512 rows on Hopper, in panels of 128 or 256 rows of W.

A program computes such a panel for `columns` rows of x, over all k or one of several parts of it.
In float16 the result is that of a product with decoded weights, but for the order of float32 sums.
In bfloat16 the 16 values are rounded to float16 before they are scaled: as decoded weights are
rounded to a grid eight times as coarse, this adds 0.4 % to their error.

plans.py     says what a program computes, and chooses how a product is divided
prepare.py   prepares a product: finds once what its calls need
kernels.py   orders x, and computes tiles of the result
assembly.py  the loop of a program over k, as PTX
decoding.py  loads and decodes weights, as PTX
tiles.py     copies tiles of x, as PTX
sums.py      adds up and stores the sums of a cluster, as PTX
inputs.py    names the inputs of the loop
"""
