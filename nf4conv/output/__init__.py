"""Writes files so that an unfinished folder never looks like a checkpoint.

writer.py          writes one shard: temporary file, positional writes, header, fsync, rename
crc32.py           combines checksums of pieces that are written in any order
folder.py          fills an output folder: shards, their records, the last files
manifest.py        writes and reads the lines of SHA256SUMS
fingerprints.py    compares what two runs make
workspace.py       locks the folder for one run, and resumes what an earlier one has begun
shared_folder.py   fills a folder from several processes, each with its part of the shards
shared_plan.py     checks the plan of these processes, which anybody may have changed
finishing.py       writes the files beside the weights, config.json last
push.py            uploads the folder to the Hub while it is filled
"""
