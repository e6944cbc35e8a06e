"""Reads checkpoints from wherever they are. Computes no tensor and never imports torch.

opening.py           opens a folder, a file or a Hub id: config, headers of every tensor
source.py            describes a checkpoint that has been opened, reads its small tensors
stamps.py            notices that a file has changed since its header was read
tensors.py           describes tensors: where their bytes are, how they are encoded
header.py            parses, validates and builds the safetensors header
reader.py            reads byte ranges of weight files, and small files as a whole
weight_files.py      finds the weight files of a folder
own_files.py         refuses links that lead out of the folder that the user named
auxiliary.py         lists the files that are copied beside the weights
diffusers_folder.py  opens a diffusers pipeline: its submodels
original_card.py     holds what is taken over from the model card of the original
original_names.py    gives the tensors of a denoiser the names that its authors gave them
record.py            reads and makes nf4conv.json
stored_weights.py    reads the tensors of one packed 4-bit weight and notes their faults
unfinished.py        recognises a folder in which a run has begun and not ended
encodings/           weights that another quantization encoded
adapters/            LoRA adapters, and merging them
pickles/             torch pickles, of which nothing is executed
remote/              the Hugging Face Hub
"""
