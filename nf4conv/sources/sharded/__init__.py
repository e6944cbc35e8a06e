"""Reads which tensors the weight files of a checkpoint hold together."""
