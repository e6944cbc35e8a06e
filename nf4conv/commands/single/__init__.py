"""Quantizing one checkpoint: the plan, and how it is carried out."""
