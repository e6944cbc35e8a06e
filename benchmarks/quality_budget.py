"""Asks what a model gains if its modules may have different formats within a budget of bits.

    python -m benchmarks.quality_budget NAME=MODEL:TEXT … --json FILE

Modules with the same inputs choose alike: blocks of 32, 64 or 128, or 16 bits. What a choice costs
is measured directly: the divergence of the model with only that module rounded, on text that the
judge does not see. No rule that calibration could apply knows more than this, so what is found here
bounds them. Choices are then made greedily, by divergence per byte, up to each budget, and the
whole model is measured beside uniform blocks of 32. Scales are searched; no activations are needed.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality_calibrated import CHUNK, Subject, nf4_bits
from nf4conv.calibrate.rounding import search

FORMATS = (128, 64, 32, 16)
"""Blocksizes, from the smallest file to the largest; 16 stands for sixteen bits."""

BUDGETS = (4.254, 4.5, 5.0)
PROBED = 4096  # bytes of text on which single modules are measured


@dataclass
class Stage:
    """Modules with the same inputs.

    Attributes:
        name: of the first of them.
        modules: that choose alike.
        weights: as they are in the original.
        rounded: the decoded weights, by format.
        costs: what rounding this stage alone costs, in nats, by format.
    """

    name: str
    modules: list[Any]
    weights: list[torch.Tensor]
    rounded: dict[int, list[torch.Tensor]]
    costs: dict[int, float]

    @property
    def elements(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    def bits(self, format: int) -> float:
        each = 16 if format == 16 else nf4_bits(format)
        return each * self.elements

    def take(self, format: int) -> None:
        for module, value in zip(self.modules, self.rounded[format], strict=True):
            module.weight.data = value


def stages_of(subject: Subject) -> list[Stage]:
    found = []
    for number, block in enumerate(subject.blocks):
        for names in subject.stages:
            modules = [block.get_submodule(name) for name in names]
            weights = [module.weight.data.clone() for module in modules]
            rounded = {16: weights}
            for blocksize in FORMATS[:-1]:
                rounded[blocksize] = [
                    search(weight.bfloat16(), "nf4", blocksize).values().float()
                    for weight in weights
                ]
            found.append(Stage(f"{number}.{names[0]}", modules, weights, rounded, {}))
    return found


def probe(subject: Subject, stages: list[Stage], ids: torch.Tensor) -> None:
    """Measures what each format of each stage costs alone."""
    before = subject.answer(ids)
    for stage in stages:
        for format in FORMATS[:-1]:
            stage.take(format)
            after = subject.answer(ids)
            stage.costs[format] = float((before.exp() * (before - after)).sum(-1).mean())
        stage.costs[16] = 0.0
        stage.take(16)
        costs = {format: f"{cost:.2e}" for format, cost in stage.costs.items()}
        print(f"{stage.name:<32}{stage.elements:>9,}  {costs}", flush=True)


def choose(stages: list[Stage], budget: float) -> dict[str, int]:
    """Returns a format for each stage: the step that saves most for its bytes, again and again."""
    chosen = {stage.name: FORMATS[0] for stage in stages}
    room = budget * sum(stage.elements for stage in stages)
    room -= sum(stage.bits(FORMATS[0]) for stage in stages)
    while True:
        best, gain = None, 0.0
        for stage in stages:
            now = chosen[stage.name]
            for format in FORMATS[FORMATS.index(now) + 1 :]:
                price = stage.bits(format) - stage.bits(now)
                saved = stage.costs[now] - stage.costs[format]
                if price <= room and saved / price > gain:
                    best, gain = (stage, format, price), saved / price
        if best is None:
            return chosen
        stage, format, price = best
        chosen[stage.name] = format
        room -= price


def measured(subject: Subject, stages: list[Stage], chosen: dict[str, int]) -> dict[str, Any]:
    for stage in stages:
        stage.take(chosen[stage.name])
    elements = sum(stage.elements for stage in stages)
    found = subject.measure()[subject.own]
    return {
        "bits": sum(stage.bits(chosen[stage.name]) for stage in stages) / elements,
        "predicted_kl": sum(stage.costs[chosen[stage.name]] for stage in stages),
        **found,
        "formats": chosen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL:TEXT")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"bytes_probed": PROBED, "models": {}}
    for described in arguments.models:
        name, _, rest = described.partition("=")
        folder, _, own = rest.rpartition(":")
        subject = Subject(Path(folder), own, texts=(own,))
        stages = stages_of(subject)
        ids = subject.calibration(own, 7)[: max(1, PROBED // subject.window)]
        assert ids.numel() <= CHUNK
        probe(subject, stages, ids)
        uniform = measured(subject, stages, {stage.name: 32 for stage in stages})
        rows = [{"budget": None, **uniform}]
        for budget in BUDGETS:
            row = measured(subject, stages, choose(stages, budget))
            row["of_uniform_32"] = row["kl"] / uniform["kl"]
            rows.append({"budget": budget, **row})
            print(json.dumps(rows[-1]), flush=True)
        record["models"][name] = {
            "rows": rows,
            "costs": {stage.name: [stage.elements, stage.costs] for stage in stages},
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
