"""Notes every fault in the tensors of packed 4-bit weights.

It is written against the format (docs/format.md), not against the code that writes the format. It
recognises and names faults that other tools are known to make.
"""
