"""Runs the commands: one entrance each, from a source and options to a plan, and to a result."""
