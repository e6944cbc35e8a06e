"""Calibrates a checkpoint: chooses codes and scales by what a text makes of the activations."""
