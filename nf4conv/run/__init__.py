"""read ▸ codec ▸ write: the bounded loop that all commands share, and the two engines in it.

checkpoint.py    carries out the plan of one checkpoint
earlier.py       recognises a result that is there already
loop.py          workers that each read, compute and write; tasks; an engine as the loop sees it
shards.py        divides an output shard into tasks; what these tasks share
engines.py       chooses the engine of a run
audit.py         checks what has just been written against its source
same_bytes.py    compares bytes in host memory
with_torch/      tasks and workers on any device
without_torch/   their counterparts on an NVIDIA GPU, without torch, which takes longer to import than to use
"""
