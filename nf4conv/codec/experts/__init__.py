"""Experts of a mixture in 4 bits: all matrices of one projection of a layer, packed.

packed.py   PackedExperts: codes and scales of E matrices, and how they are made of QuantStates
decode.py   decodes some experts of it
product.py  multiplies with them, by the kernels
offloaded.py  keeps them in host memory, and some of them in a cache on the GPU
"""

from nf4conv.codec.experts.decode import decode as decode
from nf4conv.codec.experts.packed import PackedExperts as PackedExperts
from nf4conv.codec.experts.packed import split_stack as split_stack
from nf4conv.codec.experts.packed import stack_experts as stack_experts
