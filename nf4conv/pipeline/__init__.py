"""read ▸ codec ▸ write: the bounded, overlapped loop that all commands share, and the two engines that compute in it.

loop.py          workers that each read, compute and write; tasks; an engine as the loop sees it
shards.py        an output shard as tasks, and what they share, whichever engine runs them; tasks of a stream
engines.py       which engine a run gets
audit.py         what has just been written, held against its source
with_torch/      tasks and workers on any device
without_torch/   their counterparts on an NVIDIA GPU, without torch, which takes longer to import than to use
"""
