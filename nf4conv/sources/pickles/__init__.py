"""Reads torch pickles, of which nothing is executed."""
