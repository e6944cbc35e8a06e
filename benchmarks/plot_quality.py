"""Draws divergence against size: python -m benchmarks.plot_quality FILE.json docs/quality.svg

FILE.json is that of benchmarks.quality_calibrated. Each model has a panel, on its own text.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.quality_calibrated import BASE
from nf4conv.report.plot import Point, scatter

HEIGHT = 420
GROUPS = {"J": "calibrated", "K": "calibrated", "search": "searched", "absmax": "bitsandbytes"}
KNOWN_BY = {"python": "Python sources", "english": "English docstrings"}


def main(source: Path, target: Path) -> None:
    rows = json.loads(source.read_text())["rows"]
    panels = []
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        drawn = panel(model, [row for row in rows if row["model"] == model])
        panels.append(drawn.replace("<svg ", f'<svg y="{HEIGHT * number}" ', 1))
    size = f'width="760" height="{HEIGHT * len(panels)}"'
    whole = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *panels, "</svg>"]
    target.write_text("\n".join(line.rstrip("\n") for line in whole) + "\n")


def panel(model: str, rows: list[dict[str, Any]]) -> str:
    own = rows[0]["own_text"]
    base = next(row for row in rows if row["method"] == BASE)["texts"][own]["kl"]
    points = []
    for row in rows:
        if row["calibrated_on"] not in (None, own):
            continue
        found = row["texts"][own]
        half = found["kl_half_interval"]
        low, high = (found["kl"] - half) / base, (found["kl"] + half) / base
        group = GROUPS.get(row["method"].split()[-1], "others")
        points.append(Point(row["method"], row["bits"], found["kl"] / base, low, high, group))
    # groups keep their colours in every panel
    points.sort(key=lambda point: [*GROUPS.values(), "others"].index(point.group))
    title = f"Model {model} on {KNOWN_BY[own]}: divergence against size"
    return scatter(points, title, f"KL over that of {BASE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
