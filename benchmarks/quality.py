"""Measures how good a model is after `quantize`: by data type, blocksize, scales and calibration.

    python -m benchmarks.quality MODEL [--text FILE] [--tokens 16384] [--calibrate TEXT]
        [--device cpu] [--json FILE]

For every method the checkpoint is quantized, verified against its source and evaluated: bits of a
packed weight, the root mean square over the weights of ‖W - Ŵ‖ / ‖W‖, and what `nf4conv evaluate`
finds. Methods that know the activations need a text to calibrate on, other than the one that
judges.
"""

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

import nf4conv
from benchmarks.running import parser, save

BASE: Final = "NF4, 64, absmax"

METHODS: Final[dict[str, dict[str, Any]]] = {
    f"{quant_type.upper()}, {blocksize}, {scales}": {
        "quant_type": quant_type,
        "blocksize": blocksize,
        "scales": scales,
    }
    for quant_type in ("nf4", "fp4")
    for blocksize in (32, 64, 128)
    for scales in ("absmax", "search")
}

CALIBRATED: Final[dict[str, dict[str, Any]]] = {
    "NF4, 32, calibrated": {"blocksize": 32},
    "NF4, 64, calibrated": {"blocksize": 64},
    "NF4, 64, calibrated, outputs": {"blocksize": 64, "calibrate_output": "all"},
    "NF4, 128, calibrated": {"blocksize": 128},
    "FP4, 64, calibrated": {"blocksize": 64, "quant_type": "fp4"},
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=Path)
    options.add_argument("--text", type=Path, help="as of `nf4conv evaluate`")
    options.add_argument("--tokens", type=int, default=16384, help="that judge")
    options.add_argument("--calibrate", metavar="TEXT", help="as of `nf4conv quantize`")
    options.add_argument("--calibration-tokens", type=int, default=65536)
    options.add_argument("--only", nargs="*", help=f"methods, beside {BASE}")
    options.add_argument("--device", default="cpu")
    chosen = options.parse_args()
    methods = dict(METHODS)
    if chosen.calibrate:
        given = {"calibrate": chosen.calibrate, "calibration_tokens": chosen.calibration_tokens}
        methods |= {name: method | given for name, method in CALIBRATED.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, method in methods.items():
        if name == BASE or not chosen.only or name in chosen.only:
            rows[name] = measure(chosen, method)
            print(name, rows[name], flush=True)
            save(chosen, model=chosen.model.name, device=chosen.device, rows=rows)
    judged = "kl" if "kl" in rows[BASE] else "cosine"
    print(f"| | bits a weight | weight error | {judged} | of NF4's, 64, absmax |\n|{'---|' * 5}")
    for name, row in rows.items():
        relative = f"{row['kl'] / rows[BASE]['kl']:.3f}" if judged == "kl" else ""
        figures = f"{row['weight_error']:.4f} | {row[judged]:.6f} | {relative}"
        print(f"| {name} | {row['bits']:.3f} | {figures} |")


def measure(chosen: argparse.Namespace, method: dict[str, Any]) -> dict[str, Any]:
    blocksize = method["blocksize"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        nf4conv.quantize(chosen.model, out, compute_dtype="float32", device=chosen.device, **method)
        found = nf4conv.verify(out, source=chosen.model, device=chosen.device)
        given = {"text": chosen.text, "tokens": chosen.tokens, "device": chosen.device}
        evaluation = nf4conv.evaluate(out, source=chosen.model, **given).evaluations[0]
    return {
        "bits": 4 + 8 / blocksize + 32 / (256 * blocksize),
        "weight_error": math.sqrt(statistics.fmean(row.error**2 for row in found.weights)),
        **evaluation.figures,
    }


if __name__ == "__main__":
    main()
