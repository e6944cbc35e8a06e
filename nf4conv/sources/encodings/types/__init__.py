"""Describes how tensors are decoded from others: a type for each encoding.

Every type is an `Encoding` of tensors.py.
"""
