"""Runs 4-bit models: products with packed weights, patched layers, experts of mixtures."""
