"""Experts of a mixture in 4 bits: all matrices of one projection of a layer, packed."""
