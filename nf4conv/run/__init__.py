"""Runs a plan: read ▸ codec ▸ write, in a bounded loop that all commands share."""
