"""Lists the architectures whose GGUF files can be read back.

A family is a few lines: the names of its modules in the file and in transformers, what llama.cpp's
converter moved or changed (the classes in its folder conversion/), and the keys of its config.

family.py      says what a family consists of
steps/         has what families are made of: names, joins, configs, signs
dense.py       lists decoders whose layers are all alike
later_dense.py  lists more of them
gemma.py       lists the models of Gemma
mixtures.py    lists mixtures of experts
later_mixtures.py  lists those of 2025 and later
latents.py     lists models whose keys and values are made of latents
early.py       lists decoders of 2019 to 2023 with names of their own
recurrent.py   lists models with states or convolutions
linear_attention.py  lists models with linear attention
encoders.py    lists encoders, and encoders with a decoder
registry.py    finds the family of a file
"""
