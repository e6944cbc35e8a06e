"""Files. No tensor is ever computed here, and torch is never imported.

header.py       the safetensors header: parse, validate, build
source.py       a folder or file → config and the headers of every tensor
selection.py    which tensors become 4-bit, which are kept, and why
plan.py         headers + decisions → the complete list of output tensors, their shards, offsets and sizes
reader.py       positional reads
writer.py       a shard: temporary file, positional writes, header, fsync, rename
making.py       nf4conv.json: by what a result was made
config.py       config.json and its quantization_config
"""
