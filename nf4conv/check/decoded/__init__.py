"""Checks a checkpoint that `dequantize` made, or another tool, by planning it again."""
