"""Holds a module for each command: its arguments, its options, and what it calls and prints.

inspect.py      shows what a checkpoint holds
quantize.py     quantizes a checkpoint
verify.py       verifies a 4-bit checkpoint
compare.py      compares two checkpoints
evaluate.py     compares the predictions of two models
dequantize.py   decodes a 4-bit checkpoint
finish.py       completes an output folder that several runs have filled
env.py          shows versions and the compute engine
"""
