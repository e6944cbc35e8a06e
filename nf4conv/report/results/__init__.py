"""The results that commands return. Their fields are the keys of --json, in their order.

docs/generate.py makes docs/json.md from these classes and the `Attributes` in their docstrings.
"""
