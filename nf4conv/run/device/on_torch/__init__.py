"""Computes with torch, on any device.

backend.py      is the device as all threads share it, and imports torch once it is needed
device.py       is the device as one thread uses it
buffers.py      brings bytes to the device, and tensors back
shared.py       keeps tensors that all threads share
reading.py      reads tensors and weights from a source, decoded and cut out
merge.py        merges adapters into tensors
packing.py      packs weights to 4 bits, and measures their errors
convert.py      decodes and casts tensors that are kept
subtract.py     measures how far two tensors are apart
"""
