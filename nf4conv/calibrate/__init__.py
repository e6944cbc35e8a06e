"""Calibrates a checkpoint: chooses codes and scales by what a text makes of the activations.

The decoder blocks of the model are run one at a time, by the code of the installed transformers,
and filled by our own reader. docs/calibration.md explains the options.

planning.py     reads the texts, builds the model without weights, finds its blocks
text.py         reads texts as token ids
windows.py      cuts tokens into windows, and chooses them by a seed
model.py        builds a model without weights, and finds its list of blocks
names.py        follows names on disk to the parameters of the model
flow.py         runs the part before the blocks, and notes what each block is called with
calibrating.py  calibrates block by block, or goes on with it
block.py        rounds the weights of one block, stage by stage
stages.py       groups weights that multiply the same inputs, and catches these
weights.py      fills a block with weights
activations.py  keeps the hidden states of all windows
finished.py     keeps finished blocks in the output's work folder
overlay.py      puts finished blocks in the place of the weights that they were made from
"""
