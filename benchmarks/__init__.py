"""Measures what README.md and docs/ say; `python -m benchmarks.NAME --help` tells how."""

import sys
from pathlib import Path

# the GGUF files of the tests
sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))
