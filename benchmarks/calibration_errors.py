"""Measures the relative errors of calibrated weights: what `verify --source` may find.

    python -m benchmarks.calibration_errors NAME=MODEL:TEXT … --json FILE [--windows 32]

The models are those of `benchmarks.quality_calibrated`. The weights of every second block are
rounded, each with the second moments of the original model's activations. The figure is
‖W - Ŵ‖ / ‖W‖: the least, the median and the largest of all weights, and those of searched scales.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality_calibrated import CHUNK, Subject
from nf4conv.calibrate.rounding import (
    Rounded,
    SecondMoments,
    factor,
    round_calibrated,
    round_two_sided,
    search,
)

FORMATS = (("nf4", 32), ("nf4", 64), ("nf4", 128), ("fp4", 32), ("fp4", 64), ("fp4", 128))
TWO_SIDED = (("nf4", 32), ("nf4", 64), ("fp4", 64))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL:TEXT")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=32)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for described in arguments.models:
        name, _, rest = described.partition("=")
        folder, _, own = rest.rpartition(":")
        model = Measured(Subject(Path(folder), own, (own,)), arguments.windows)
        for knows, formats in (("search", FORMATS), ("J", FORMATS), ("K", TWO_SIDED)):
            for quant_type, blocksize in formats:
                found = model.errors(knows, quant_type, blocksize)
                row = {"model": name, "knows": knows, "quant_type": quant_type}
                rows.append(row | {"blocksize": blocksize} | summary(found))
                print(json.dumps(rows[-1]), flush=True)
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        del model
        gc.collect()


def summary(errors: Sequence[float]) -> dict[str, float]:
    return {
        "weights": len(errors),
        "least": round(min(errors), 4),
        "median": round(statistics.median(errors), 4),
        "largest": round(max(errors), 4),
    }


class Measured:
    """The stages of a model, with what is known of their inputs and outputs."""

    def __init__(self, subject: Subject, windows: int) -> None:
        self.subject = subject
        ids = subject.calibration(subject.own, 0)[:windows]
        self.outputs = {module: found.mean() for module, found in subject.gradients(ids).items()}
        self.stages = []
        for block in list(subject.blocks)[::2]:
            for names in subject.stages:
                self.stages.append([block.get_submodule(name) for name in names])
        self.moments = self.gather(ids)

    @torch.no_grad()
    def gather(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """Returns the second moments of the inputs of each stage."""
        found = []
        hooks = []
        for modules in self.stages:
            found.append(SecondMoments.zeros(modules[0].in_features, torch.device("cpu")))
            hooks.append(modules[0].register_forward_pre_hook(add_inputs(found[-1])))
        for part in ids.split(CHUNK // self.subject.window):
            self.subject.model(part)
        for hook in hooks:
            hook.remove()
        return [one.mean() for one in found]

    @torch.no_grad()
    def errors(self, knows: str, quant_type: str, blocksize: int) -> list[float]:
        """Returns the relative error of each weight."""
        found = []
        for modules, moments in zip(self.stages, self.moments, strict=True):
            weights = [module.weight.data.bfloat16() for module in modules]
            results = self.rounded(knows, quant_type, blocksize, weights, moments, modules)
            for weight, result in zip(weights, results, strict=True):
                difference = result.values(torch.float32) - weight.float()
                found.append(float(difference.norm() / weight.float().norm()))
        return found

    def rounded(
        self,
        knows: str,
        quant_type: str,
        blocksize: int,
        weights: list[torch.Tensor],
        moments: torch.Tensor,
        modules: Sequence[Any],
    ) -> list[Rounded]:
        if knows == "search":
            return [search(weight, quant_type, blocksize) for weight in weights]
        of_inputs = factor(moments, blocksize)
        if knows == "J":
            return round_calibrated(weights, of_inputs, quant_type)
        return [
            round_two_sided(weight, of_inputs, self.outputs[module], quant_type)
            for weight, module in zip(weights, modules, strict=True)
        ]


def add_inputs(moments: SecondMoments) -> Callable[..., None]:
    def add(_: object, seen: tuple[torch.Tensor, ...]) -> None:
        moments.add(seen[0])

    return add


if __name__ == "__main__":
    main()
