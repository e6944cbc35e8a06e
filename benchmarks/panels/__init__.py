"""Kernels and plans for 33 to 512 rows of x that want measuring on a GPU: nothing of the package
uses them. `python -m benchmarks.panel_plans` times them.

costs.py        estimates what a plan takes, and says which plans are worth a measurement
kernels.py      the kernel of other candidates: x in order or as it is, a shorter end
streaming.py    a kernel whose programs share all turns evenly
prepare.py      prepares products by candidates
assembly.py     its loop over k for x as it is, as PTX
scaling.py      the same with sums that are scaled instead of weights
transposing.py  exchanges bytes of codes between lanes, as PTX
ending.py       leaves and stores the sums of a program
maps.py         describes x to the unit that copies tiles
compiling.py    compiles candidates without a GPU
"""
