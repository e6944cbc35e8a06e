"""Reads checkpoints from wherever they are. Computes no tensor and never imports torch."""
