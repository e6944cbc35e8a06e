"""Experts of a mixture in 4 bits: all matrices of one projection of a layer, packed."""

from nf4conv.inference.experts.packed import PackedExperts as PackedExperts
from nf4conv.inference.experts.packed import decode as decode
from nf4conv.inference.experts.packed import split_stack as split_stack
from nf4conv.inference.experts.packed import stack_experts as stack_experts
