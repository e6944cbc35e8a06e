"""Writes files so that an unfinished folder never looks like a checkpoint.

writer.py          writes one shard: temporary file, positional writes, header, fsync, rename
crc32.py           combines checksums of pieces that are written in any order
workspace.py       holds the output folder of one run: lock, records, resume
shared_folder.py   holds an output folder that several processes fill in parts
finishing.py       writes the files beside the weights, config.json last
push.py            uploads the folder to the Hub while it is filled
"""
