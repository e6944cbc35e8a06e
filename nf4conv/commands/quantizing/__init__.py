"""Quantizes one checkpoint, or each submodel of a diffusers pipeline."""
