"""Shows results on a terminal: as lines and tables; notes and progress on stderr.

terminal.py      makes text fit for a terminal, and writes lines to stderr
progress_bar.py  shows how far a run is
tables.py        sets rows as a table, and numbers as cells
checks.py        shows what `verify` and `compare` found
contents.py      shows what `inspect`, `--dry-run` and `env` found
runs.py          shows what `quantize`, `dequantize` and `finish` did
"""

from nf4conv.report.text.checks import comparison_lines, verification_lines
from nf4conv.report.text.contents import environment_lines, inspection_lines, plan_lines
from nf4conv.report.text.progress_bar import progress
from nf4conv.report.text.runs import dequantization_lines, finish_lines, quantization_lines
from nf4conv.report.text.terminal import printable, size, tell, tell_notes

__all__ = [
    "comparison_lines",
    "dequantization_lines",
    "environment_lines",
    "finish_lines",
    "inspection_lines",
    "plan_lines",
    "printable",
    "progress",
    "quantization_lines",
    "size",
    "tell",
    "tell_notes",
    "verification_lines",
]
