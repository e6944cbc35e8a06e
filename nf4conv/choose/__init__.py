"""Decides which tensors become 4-bit, which are kept, and why. Reads headers and config alone."""
