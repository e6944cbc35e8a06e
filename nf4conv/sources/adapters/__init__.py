"""Reads LoRA adapters of PEFT, and merges them into a source.

adapter.py   reads what an adapter consists of: its config and its tensors
patterns.py  finds the pattern of a config that fits a module, in bounded time
merging.py   opens a source and gives it the tensors that adapters change
base.py      finds tensors of the source by the names that they have in the model
modules.py   finds out what an adapter does to the weights of a module
experts.py   finds out what an adapter does to parameters that stack experts
order.py     finds out in which order an adapter stores the factors of experts
tied.py      decides about an output head that is the embedding
"""
