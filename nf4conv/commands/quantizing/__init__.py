"""Quantizes one checkpoint, or each submodel of a diffusers pipeline.

checkpoint.py    plans one checkpoint, prepares the plan, and carries it out
pipeline.py      quantizes a diffusers pipeline: each submodel by its own rules
writing.py       writes a prepared plan, or finds what an earlier run has written of it
publishing.py    uploads a result: opens its repository before the run, and commits after it
"""
