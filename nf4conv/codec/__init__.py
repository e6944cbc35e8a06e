"""Packs, searches and decodes: tensors in, tensors out. Opens no file, knows no model."""
