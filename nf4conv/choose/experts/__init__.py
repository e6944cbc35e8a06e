"""Finds experts, checks that they are whole, cuts stacks of them apart, and knows who reads them.

gathering.py   finds the experts of a checkpoint: single ones, and stacks of them
stacks.py      cuts stacks of experts into the weights of single experts
layers.py      decides about the experts of a layer together
readers.py     says who reads experts in 4 bits
"""
