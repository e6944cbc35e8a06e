"""Checks a finished checkpoint by its headers, config and small tensors. Decodes no weights."""
