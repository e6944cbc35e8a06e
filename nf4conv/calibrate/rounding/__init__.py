"""Rounds weights to 4 bits with knowledge of the activations: docs/quality.md explains it."""
