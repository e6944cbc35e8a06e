"""Reads GGUF files of llama.cpp as the checkpoints of transformers that they were made from.

opening.py      opens a file, or all files of a split one
header.py       reads metadata, and where the tensors are
incoming.py     reads the bytes of a header, more of them when they are needed
remembered.py   remembers where arrays of strings end, for the next run
families/       lists architectures: their names, what llama.cpp's converter moved, their configs
towers/         reads the tower of a model that sees
presenting.py   presents a file's tensors under the names and in the layout of transformers
settings.py     makes config.json of the metadata
numbers.py      reads numbers of the metadata
card.py         finds the model card of a file, or makes one of the metadata
tokenizing.py   makes tokenizer.json of the metadata
unpacked.py     writes these files to the cache, where a checkpoint's other files are looked for
"""
