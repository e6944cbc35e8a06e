"""Measures how good a model is after `quantize`, by data type, blocksize and kind of scales.

    python -m benchmarks.quality MODEL [--text FILE] [--tokens 16384] [--device cpu] [--json FILE]

For every method the checkpoint is quantized, verified against its source and evaluated: bits of a
packed weight, the relative error of the weights ‖W - Ŵ‖ / ‖W‖, that of the layers' outputs ‖X(W -
Ŵ)ᵀ‖ / ‖XWᵀ‖ for the inputs X that the original's layers see on the first tokens, and what `nf4conv
evaluate` finds. The layers' errors are root mean squares over the layers.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import nf4conv
from nf4conv.commands.evaluate import answers, load, make_question
from nf4conv.options import EvaluateOptions
from nf4conv.sources.opening import open_stored

METHODS = [
    (quant_type, blocksize, scales)
    for quant_type in ("nf4", "fp4")
    for blocksize in (32, 64, 128)
    for scales in ("absmax", "search")
]
BASE = ("nf4", 64, "absmax")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="as of `nf4conv evaluate`")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = EvaluateOptions(
        source=arguments.model,
        text=arguments.text,
        tokens=arguments.tokens,
        device=arguments.device,
    )
    grams = output_energies(arguments.model, options)
    rows = [
        measure(arguments.model, *method, options, arguments.device, grams) for method in METHODS
    ]
    base = next(row for row in rows if (row["quant_type"], row["blocksize"], row["scales"]) == BASE)
    for row in rows:
        if "kl" in row:
            row["kl_of_base"] = row["kl"] / base["kl"]
    print_table(rows)
    if arguments.json:
        libraries = {name: version(name) for name in ("torch", "transformers", "bitsandbytes")}
        about = {
            "model": arguments.model.name,
            "device": arguments.device,
            "date": time.strftime("%Y-%m-%d"),
        } | libraries
        arguments.json.write_text(json.dumps({"settings": about, "rows": rows}, indent=1) + "\n")


def output_energies(model: Path, options: EvaluateOptions) -> dict[str, torch.Tensor]:
    """XᵀX of each linear layer, by the name of its weight."""
    question = make_question([open_stored(model)], options)
    few = question.ids[: max(1, 4096 // question.ids.shape[1])]
    question = replace(question, ids=few)
    loaded, found = load(question, model), {}

    def hook(name: str) -> Any:
        def add(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            found[name] = found.get(name, 0) + x.T @ x

        return add

    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.inference_mode():
        for _ in answers(loaded, question):
            pass
    return found


def measure(
    model: Path,
    quant_type: str,
    blocksize: int,
    scales: str,
    options: EvaluateOptions,
    device: str,
    grams: dict[str, torch.Tensor],
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, again = Path(folder) / "out", Path(folder) / "again"
        nf4conv.quantize(
            model,
            out,
            quant_type=quant_type,
            blocksize=blocksize,
            scales=scales,
            compute_dtype="float32",
            device=device,
        )
        found = nf4conv.verify(out, source=model, device=device)
        nf4conv.dequantize(out, again, dtype="float32")
        outputs = list(
            output_errors(
                weights(model), weights(again), [row.name for row in found.weights], grams
            )
        )
        evaluation = nf4conv.evaluate(
            out, source=model, text=options.text, tokens=options.tokens, device=device
        ).evaluations[0]
    nested = 8 / blocksize + 32 / (256 * blocksize)
    errors = [row.error for row in found.weights]
    row = {
        "quant_type": quant_type,
        "blocksize": blocksize,
        "scales": scales,
        "bits": 4 + nested,
        "weight_error": math.sqrt(statistics.fmean(error**2 for error in errors)),
        "output_error": math.sqrt(statistics.fmean(error**2 for error in outputs)),
        **{
            name: value
            for name, value in asdict(evaluation).items()
            if name not in ("out", "source", "passed", "figures")
        },
        **evaluation.figures,
    }
    print(json.dumps(row), flush=True)
    return row


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def output_errors(
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
    names: list[str],
    grams: dict[str, torch.Tensor],
) -> Iterator[float]:
    for name in names:
        gram = next(
            (gram for known, gram in grams.items() if known.endswith(name) or name.endswith(known)),
            None,
        )
        if gram is not None:
            weight, found = before[name].double(), after[name].double()
            difference = weight - found
            yield math.sqrt(
                float(((difference @ gram) * difference).sum() / ((weight @ gram) * weight).sum())
            )


def print_table(rows: list[dict[str, Any]]) -> None:
    judged = "kl" if "kl" in rows[0] else "cosine"
    print(
        f"| | bits a weight | weight error | output error | {judged} | of NF4's, 64, absmax "
        f"|\n|{'---|' * 6}"
    )
    for row in rows:
        name = f"{row['quant_type'].upper()}, {row['blocksize']}, {row['scales']}"
        relative = f"{row['kl_of_base']:.3f}" if "kl_of_base" in row else ""
        errors = f"{row['weight_error']:.4f} | {row['output_error']:.4f}"
        print(f"| {name} | {row['bits']:.3f} | {errors} | {row[judged]:.6f} | {relative} |")


if __name__ == "__main__":
    main()
