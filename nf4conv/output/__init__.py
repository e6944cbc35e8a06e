"""Writes files so that an unfinished folder never looks like a checkpoint."""
