"""Runs the code of a model, block by block, with weights of a checkpoint."""
