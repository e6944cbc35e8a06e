"""Runs a plan: read ▸ codec ▸ write, in a bounded loop that all commands share.

checkpoint.py    carries out the plan of one checkpoint
filling.py       writes all shards into an opened folder, then its last files
earlier.py       recognises a result that is there already
writing.py       opens the devices that make shards, and divides shards into tasks
verifying.py     verifies the values of a checkpoint
comparing.py     compares tensors of two checkpoints
audit.py         checks what has just been written against its source
reading.py       opens a reader of a source, wherever its files are
scales.py        looks at the scales of weights in 4 bits before they are decoded
loop.py          runs tasks by a few workers that each read, compute and write
worker.py        is one thread: its reader, its buffer, its devices
shards.py        follows a shard that is being written
pieces.py        cuts weights and tensors into pieces
grouping.py      puts small items together, and items of several groups in turn
tasks/           holds what workers do, written once for all devices
device/          computes: with torch, or on an NVIDIA GPU without torch
"""
