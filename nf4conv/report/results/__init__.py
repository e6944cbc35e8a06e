"""The results that commands return. Their fields are the keys of --json, in their order.

docs/generate.py makes docs/json.md from these classes and the `Attributes` in their docstrings.

runs.py       describes what `quantize`, `dequantize` and `finish` would do, or did
checks.py     describes what `verify` and `compare` found
contents.py   describes what `inspect`, `evaluate` and `env` found
"""
