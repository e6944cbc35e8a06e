"""Experts of a mixture in 4 bits: all matrices of one projection of a layer, packed.

packed.py   PackedExperts: codes and scales of E matrices, and how they are made of QuantStates
decode.py   decodes some experts of it
projection.py  what of them the kernels multiply with
product.py  multiplies with them, by the kernels
wide.py     the same for few rows on Hopper
offloaded.py  keeps them in host memory, and some of them in a cache on the GPU
"""

from nf4conv.codec.experts.decode import decode as decode
from nf4conv.codec.experts.packed import PackedExperts as PackedExperts
from nf4conv.codec.experts.packed import split_stack as split_stack
from nf4conv.codec.experts.packed import stack_experts as stack_experts
