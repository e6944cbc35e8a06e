"""Kernels for the experts of mixtures, packed in stacks: one projection of a layer each."""
