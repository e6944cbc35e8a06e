"""Weight → packed codes, absmax and the codes of absmax.

quantize.py  encodes a tile of a weight with absmax
search.py    encodes a tile of a weight with searched scales
nested.py    encodes absmax to 8 bits
pack.py      launches quantize.py and search.py for one weight
batch.py     launches quantize.py, search.py and nested.py for many tensors at once
mean.py      computes the mean that nested.py subtracts, in torch's order
finite.py    finds NaN and infinity
"""
