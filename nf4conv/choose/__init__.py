"""Decides which tensors become 4-bit, which are kept, and why. Reads headers and config alone.

choice.py       chooses everything about the quantization of one checkpoint
selection.py    decides for every tensor
evidence.py     collects what names, shapes and the config tell about a tensor
skip_list.py    builds and checks llm_int8_skip_modules, as each loader matches it
name_index.py   looks names up in paths quickly
formats.py      chooses how weights are packed
unchanged.py    decides which weights of a 4-bit source stay as they are
skeleton.py     asks the installed transformers (--plan-with transformers)
"""
