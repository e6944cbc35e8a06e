"""Decides which tensors become 4-bit, which are kept, and why. Reads headers and config alone.

choice.py         chooses everything about the quantization of one checkpoint
decisions.py      declares what may be decided about a tensor, and about a whole checkpoint
selection.py      decides for every tensor of a checkpoint
evidence.py       collects what names, shapes and the config tell about the tensors
wishes.py         applies what the user asked for by names: --include, --exclude, --skip-modules
skip_list.py      builds and checks llm_int8_skip_modules
loader_rules.py   matches a list of modules as each loader does
name_index.py     looks names up in paths quickly
formats.py        chooses how weights are packed
unchanged.py      decides which weights of a 4-bit source stay as they are
parsing.py        lets transformers parse a config.json that may name code to fetch
counts.py         refuses configs with many more layers than the tensors show
skeleton.py       asks the installed transformers (--plan-with transformers)
experts/          finds experts, checks that they are whole, and cuts stacks of them apart
"""
