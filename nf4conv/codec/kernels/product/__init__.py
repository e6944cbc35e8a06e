"""x, packed codes, absmax → x · Wᵀ, without writing what is decoded, for up to 512 rows of x.

choosing.py        chooses by shapes what multiplies: a kernel, or decoding and the library
launches.py        chooses the shape of kernel.py and launches it
kernel.py          up to 64 rows, 32 on Hopper: a kernel in Triton, around the code of a thread
assembly.py        that code, as PTX
panel.py           33 to 512 rows on Hopper
panel_assembly.py  its loop, as PTX
dense.py           plain Triton for weights that the others cannot read
"""
