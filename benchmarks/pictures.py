"""Draws the pictures of docs/ from benchmarks/results/; needs matplotlib.

python -m benchmarks.pictures
"""

import json
import statistics
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib import pyplot

RESULTS: Final = Path(__file__).parent / "results"
DOCS: Final = Path(__file__).parent.parent / "docs"
OURS, OTHERS = "#0b6e4f", "#8a8f98"


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def end_to_end() -> None:
    """Seconds and memory of whole commands, of nf4conv and of transformers with bitsandbytes."""
    places = {"H200, 8.0 B": "end_to_end_h200.json", "2 cores, 1.5 B": "end_to_end_cpu.json"}
    figures = {"seconds": ("wall_seconds", 1), "GB of memory": ("host_peak_bytes", 1e9)}
    labels = ["transformers + bitsandbytes", "nf4conv"]
    figure, axes = pyplot.subplots(2, 2, figsize=(7, 2.6))
    for row, (place, file) in zip(axes, places.items(), strict=True):
        runs = result(file)["contests"]["quantize"]["runs"]
        for axis, (unit, (key, scale)) in zip(row, figures.items(), strict=True):
            shown = [statistics.median(run[key] for run in runs[label]) for label in labels]
            shown = [value / scale for value in shown]
            bars = axis.barh(labels, shown, color=[OTHERS, OURS])
            axis.bar_label(bars, fmt="%.2f", padding=3)
            axis.set_title(f"{place}, {unit}", loc="left")
            axis.set_xlim(0, 1.25 * max(shown))
            axis.set_xticks([])
        row[1].set_yticks([])
    finish(figure, "end_to_end.svg")


def quality() -> None:
    """Divergence from the original against bits a weight, of models A and B on their own text."""
    rows = result("quality_calibrated.json")["rows"]
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    for axis, model in zip(axes, sorted({row["model"] for row in rows}), strict=True):
        own = [
            row
            for row in rows
            if row["model"] == model and row["calibrated_on"] in (None, row["own_text"])
        ]
        base = next(row for row in own if row["method"] == "NF4 64 absmax")
        for row in own:
            text = row["own_text"]
            ratio = row["texts"][text]["kl"] / base["texts"][text]["kl"]
            colour = OURS if row["method"].startswith("NF4") else OTHERS
            axis.scatter(row["bits"], ratio, color=colour, s=18)
            axis.annotate(
                row["method"], (row["bits"], ratio), (4, 2), textcoords="offset points", size=6
            )
        axis.set_title(f"model {model}", loc="left")
        axis.set_xlim(4, 4.65)
        axis.set_xlabel("bits a weight")
    axes[0].set_ylabel("divergence, of NF4's with absmax")
    axes[0].set_ylim(0, 1.25)
    finish(figure, "quality.svg")


def finish(figure: Any, name: str) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / name, metadata={"Date": None})


if __name__ == "__main__":
    mpl.rcParams |= {"font.size": 8, "svg.hashsalt": "nf4conv", "svg.fonttype": "none"}
    end_to_end()
    quality()
