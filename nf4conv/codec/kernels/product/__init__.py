"""x, packed codes, absmax → x · Wᵀ, in one launch for up to 64 rows of x.

choosing.py  chooses by shapes what multiplies: a kernel, or decoding and the library
launches.py  chooses the kernel's shape and launches it
kernel.py    the kernel in Triton, around the code of a thread
assembly.py  that code, as PTX
dense.py     a kernel of plain Triton for weights that the other cannot read
"""
