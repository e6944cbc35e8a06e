"""Weights that another quantization encoded, presented as the float tensors that they stand for.

encoded.py   recognises them by config and names
pieces.py    cuts tensors, encoded or not, into pieces that can be decoded alone
"""
