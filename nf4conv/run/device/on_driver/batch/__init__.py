"""Computes a batch of tensors in one thread: one upload, some launches, one download."""
