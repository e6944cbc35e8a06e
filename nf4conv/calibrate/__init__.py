"""Calibrates a checkpoint: chooses codes and scales by what a text makes of the activations.

The decoder blocks of the model are run one at a time, by the code of the installed transformers,
and filled by our own reader. docs/calibration.md explains the options.

planning.py     builds the model without weights, finds its blocks
reading.py      reads the texts in windows that the model can take
needs.py        estimates time, memory and disk, and refuses what has no room
text.py         reads texts as token ids; texts/ has those that nf4conv ships
windows.py      cuts tokens into windows, and chooses them by a seed
calibrating.py  calibrates block by block, or goes on with it
block.py        rounds the weights of one block, stage by stage
moments.py      adds up what goes into a stage, or into each expert of one
gradients.py    finds how the predictions depend on outputs: one backward pass
session.py      runs parts of one model on one device
stages.py       groups weights that multiply the same inputs, and catches these
model/          runs the code of the model
activations.py  keeps the hidden states of all windows
finished.py     keeps finished blocks in the output's work folder
overlay.py      puts finished blocks in the place of the weights that they were made from
"""
