"""Reads checkpoints from wherever they are. Computes no tensor and never imports torch.

opening.py          opens a folder, a file or a Hub id: config, headers of every tensor
places.py           reads the names of models on the Hub, addresses of their pages too
source.py           describes a checkpoint that has been opened, reads its small tensors
stamps.py           notices that a file has changed since its header was read
tensors.py          describes tensors: where their bytes are, and what any encoding can tell
header.py           parses, validates and builds the safetensors header
reader.py           reads byte ranges of weight files, and small files as a whole
weight_files.py     finds the weight files of a folder
own_files.py        refuses links that lead out of the folder that the user named
auxiliary.py        lists the files that are copied beside the weights
original_card.py    holds what is taken over from the model card of the original
record.py           reads and makes nf4conv.json
stored_weights.py   describes packed 4-bit weights as they lie on disk, and their faults
unfinished.py       recognises a folder in which a run has begun and not ended
sharded/            reads which tensors all weight files hold together
weight_faults/      finds what is wrong with the tensors of packed 4-bit weights
encodings/          presents weights that another quantization encoded as floats
adapters/           reads LoRA adapters, and merges them into a source
diffusers/          opens diffusers pipelines, gives denoisers their original names
gguf/               reads GGUF files of llama.cpp
pickles/            reads torch pickles, of which nothing is executed
remote/             reads from the Hugging Face Hub
"""
