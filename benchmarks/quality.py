"""Measures how good a model is after `quantize`, by data type, blocksize and kind of scales.

    python -m benchmarks.quality MODEL [--text FILE] [--tokens 16384] [--device cpu] [--json FILE]

For every method the checkpoint is quantized, verified against its source and evaluated: bits of a
packed weight, the root mean square over the weights of ‖W - Ŵ‖ / ‖W‖, and what `nf4conv evaluate`
finds.
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import nf4conv
from benchmarks.records import parser, save

METHODS = [
    (quant_type, blocksize, scales)
    for quant_type in ("nf4", "fp4")
    for blocksize in (32, 64, 128)
    for scales in ("absmax", "search")
]
BASE = ("nf4", 64, "absmax")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=Path)
    options.add_argument("--text", type=Path, help="as of `nf4conv evaluate`")
    options.add_argument("--tokens", type=int, default=16384)
    options.add_argument("--device", default="cpu")
    chosen = options.parse_args()
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for method in METHODS:
        rows[method] = measure(chosen, *method)
        print(rows[method], flush=True)
        save(chosen, model=chosen.model.name, device=chosen.device, rows=list(rows.values()))
    judged = "kl" if "kl" in rows[BASE] else "cosine"
    print(f"| | bits a weight | weight error | {judged} | of NF4's, 64, absmax |\n|{'---|' * 5}")
    for (quant_type, blocksize, scales), row in rows.items():
        name = f"{quant_type.upper()}, {blocksize}, {scales}"
        relative = f"{row['kl'] / rows[BASE]['kl']:.3f}" if judged == "kl" else ""
        figures = f"{row['weight_error']:.4f} | {row[judged]:.6f} | {relative}"
        print(f"| {name} | {row['bits']:.3f} | {figures} |")


def measure(
    chosen: argparse.Namespace, quant_type: str, blocksize: int, scales: str
) -> dict[str, Any]:
    method = {"quant_type": quant_type, "blocksize": blocksize, "scales": scales}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        made = {**method, "compute_dtype": "float32", "device": chosen.device}
        nf4conv.quantize(chosen.model, out, **made)
        found = nf4conv.verify(out, source=chosen.model, device=chosen.device)
        given = {"text": chosen.text, "tokens": chosen.tokens, "device": chosen.device}
        evaluation = nf4conv.evaluate(out, source=chosen.model, **given).evaluations[0]
    return {
        **method,
        "bits": 4 + 8 / blocksize + 32 / (256 * blocksize),
        "weight_error": math.sqrt(statistics.fmean(row.error**2 for row in found.weights)),
        **evaluation.figures,
    }


if __name__ == "__main__":
    main()
