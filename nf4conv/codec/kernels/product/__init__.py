"""x, packed codes, absmax → x · Wᵀ, without writing what is decoded, for up to 512 rows of x.

choosing.py   chooses by shapes what multiplies: a kernel, or decoding and the library
launches.py   prepares and launches kernel.py and held.py
shapes.py     lists which shapes these kernels have
balancing.py  chooses a shape, and how many parts of k fill a GPU best
dividing.py   divides a product among programs
kernel.py     up to 64 rows, 32 on Hopper: a kernel in Triton, around the code of a thread
wide.py       what it does with up to four rows of x
tile.py       what it does with more
held.py       one or two rows of x that stay in registers
group.py      several weights in one launch, by kernel.py or held.py
sums.py       adds up the parts of products whose k was divided
common.py     pieces of these kernels
assembly.py   the code of a thread, as PTX
panels/       33 to 512 rows on Hopper
dense.py      plain Triton for weights that the others cannot read
"""
