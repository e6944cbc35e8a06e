"""Holds what commands return, and shows it."""
