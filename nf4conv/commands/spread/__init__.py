"""Spreads one run over several workers, each of which makes some parts of the checkpoint.

carry_out.py   has workers make all parts, watches them, and finishes the checkpoint
part.py        makes one part, in a worker
places.py      finds the GPUs of this host and the cores beside them
processes.py   workers that are processes of this host, one for each GPU
ray_tasks.py   workers that are tasks of a Ray cluster
"""
