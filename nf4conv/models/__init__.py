"""Knows how model architectures are configured and named. Reads no weights."""
