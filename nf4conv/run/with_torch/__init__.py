"""The engine that computes with torch, on any device: workers, and tasks for everything that a
command does.

worker.py       a thread's buffers, and a stream on a GPU
reading.py      tensors and weights from a source, decoded and cut out
pack.py         weights → 4 bits, 4 bits → weights, and what is kept
check.py        what is stored against what it was made from
difference.py   a tensor against another
scan.py         which weights hold NaN or infinity
"""
