"""Spreads one run over several workers, each of which makes some parts of the checkpoint."""
