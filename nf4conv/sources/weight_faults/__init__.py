"""Notes every fault in the tensors of packed 4-bit weights.

It is written against the format (docs/format.md), not against the code that writes the format. It
recognises and names faults that other tools are known to make.

weight.py        notes the faults of one weight, and describes it if it can be decoded nevertheless
components.py    finds missing components, and those whose dtype, shape or file is wrong
quant_state.py   reads the JSON of a quant state, and finds what is wrong with it
code_maps.py     finds code maps that differ from the standard ones
"""
