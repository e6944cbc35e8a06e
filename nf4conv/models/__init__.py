"""Knows how model architectures are configured and named. Reads no weights.

config.py         reads and edits config.json
families.py       lists model types that deviate from the rules
module_names.py   maps names on disk to the names that loaders use
"""
