"""Holds a module for each command: its arguments, its options, and what it calls and prints."""
