"""Checks a checkpoint that `dequantize` made, or another tool that decodes, by planning it again.

asking.py     finds out what was asked for when it was made
matching.py   matches its tensors with what the plan makes
"""
