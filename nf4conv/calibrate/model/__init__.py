"""Runs the code of a model: the only place that knows transformers' modules.

building.py  builds a model without weights, and finds its list of blocks
names.py     follows names on disk to the parameters of the model
flow.py      runs the part before the blocks, and notes what each block is called with
weights.py   fills a part of the model with weights
experts.py   knows the experts in a stacked parameter, and catches what goes into each
"""
