"""Shows results on a terminal: as lines and tables; notes and progress on stderr.

terminal.py      makes text fit for a terminal, and writes lines to stderr
progress_bar.py  shows how far a run is
tables.py        sets rows as a table, and numbers as cells
checks.py        shows what `verify` and `compare` found
contents.py      shows what `inspect`, `--dry-run` and `env` found
evaluations.py   shows what `evaluate` found
runs.py          shows what `quantize`, `dequantize` and `finish` did
"""
