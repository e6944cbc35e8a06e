"""Evaluates models on the CPU."""

from pathlib import Path
from typing import Any

import nf4conv


def evaluated(out: Path | str, source: Path | str, **options: Any) -> nf4conv.Evaluation:
    """Returns how far the answers of a model in 4 bits are from those of its original."""
    found = nf4conv.evaluate(out, source=source, device="cpu", **options)
    return found.evaluations[0]
