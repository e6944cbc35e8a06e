"""Cuts tensors, encoded or not, so that each piece can be read and decoded alone."""
