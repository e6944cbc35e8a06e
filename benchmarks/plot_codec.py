"""Draw benchmarks: python -m benchmarks.plot_codec benchmarks/results/codec_gpu_h200.json out.svg

Bars of GB/s, dequantization by shape and quantization by input, with the copy of the same bytes as
a line over them. Of whole commands, given one record or more (end_to_end_h200.json
end_to_end_cpu.json out.svg), bars of seconds and of host memory.
"""

import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

COLOURS = {"nf4conv": "#1b6ca8", "Unsloth": "#8fb8de", "bitsandbytes": "#c9c9c9"}
TOP, HEIGHT, LEFT, GROUP, BAR = 60, 260, 60, 84, 22
SCALE = HEIGHT / 4500  # pixels for each GB/s

Group = tuple[str, dict[str, float]]


def main(source: Path, target: Path) -> None:
    record = json.loads(source.read_text())
    groups = chosen_groups(record["rows"])
    width = LEFT + GROUP * len(groups) + 20
    parts = [
        text(
            LEFT,
            20,
            f"GB/s on one {record['versions']['gpu']}, the line is a device copy of the same bytes",
            14,
        ),
        *legend(),
        *axis(width),
    ]
    for index, group in enumerate(groups):
        parts += bars(LEFT + index * GROUP + 8, group)
    target.write_text(document(width, TOP + HEIGHT + 70, parts))


def whole_commands(sources: list[Path], target: Path) -> None:
    """Draws two groups of bars for each record, seconds and host memory. The longest bar of a group
    has full length.
    """
    left, length, step = 200, 400, 24
    parts, top = [text(16, 24, "whole command, bfloat16 to NF4, files in memory", 14)], 48
    for source in sources:
        record = json.loads(source.read_text())
        machine, summary = record["machine"], record["summary"]
        parameters = record["runs"]["nf4conv"][0]["parameters"]
        place = machine["gpu"] or f"{machine['cores']} cores, no GPU"
        parts.append(text(16, top + 2, f"{parameters / 1e9:.1f} B parameters, {place}", 12))
        for unit, ours, theirs in (
            (
                "s",
                summary["wall_seconds"]["nf4conv"],
                summary["wall_seconds"]["transformers + bitsandbytes"],
            ),
            (
                "GB of memory",
                summary["host_peak_bytes"] / 1e9,
                summary["peer_host_peak_bytes"] / 1e9,
            ),
        ):
            for name, value in (("nf4conv", ours), ("transformers + bitsandbytes", theirs)):
                top += step
                width = length * value / max(ours, theirs)
                colour = COLOURS[name.split(" + ")[-1]]
                parts.append(text(16, top, name))
                parts.append(
                    f'<rect x="{left}" y="{top - 13}" width="{width:.1f}" height="18" '
                    f'fill="{colour}"/>'
                )
                parts.append(text(left + width + 6, top, f"{value:.3g} {unit}"))
            top += 8
        top += 36
    target.write_text(document(720, top - 12, parts))


def chosen_groups(rows: list[dict[str, str]]) -> list[Group]:
    """Dequantize at every shape, then quantize, each with provider → GB/s."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        kernel = row["kernel"]
        if kernel.startswith("dequantize nested"):
            label = f"{'dequantize' if 'nf4' in kernel else 'fp4 deq.'}|{row['shape']}"
        elif kernel.startswith("quantize") and "packed" in kernel:
            label = "|".join(kernel.removesuffix(", packed + absmax").split(" from "))
        else:
            continue
        groups.setdefault(label, {})[row["provider"]] = float(row["gigabytes_per_second"])
    return list(groups.items())


def legend() -> list[str]:
    parts = []
    for index, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + index * 120
        parts += [
            f'<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>',
            text(x + 18, 42, name),
        ]
    return parts


def axis(width: int) -> list[str]:
    parts = []
    for speed in range(0, 4501, 1000):
        y = TOP + HEIGHT - speed * SCALE
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{width - 10}" y2="{y:.1f}" stroke="#e5e5e5"/>'
        )
        parts.append(text(LEFT - 38, y + 4, str(speed)))
    return parts


def bars(x: int, group: Group) -> list[str]:
    label, speeds = group
    parts = []
    for index, (name, colour) in enumerate(COLOURS.items()):
        if name in speeds:
            height = speeds[name] * SCALE
            left, top = x + index * BAR, TOP + HEIGHT - height
            parts.append(
                f'<rect x="{left}" y="{top:.1f}" width="{BAR - 2}" height="{height:.1f}" '
                f'fill="{colour}"/>'
            )
    copy = TOP + HEIGHT - speeds["copy"] * SCALE
    parts.append(
        f'<line x1="{x - 3}" y1="{copy:.1f}" x2="{x + 3 * BAR}" y2="{copy:.1f}" stroke="#222"/>'
    )
    return parts + [
        text(x, TOP + HEIGHT + 16 + 14 * line, word) for line, word in enumerate(label.split("|"))
    ]


def document(width: int, height: int, parts: list[str]) -> str:
    """A whole drawing, on white."""
    place = f'width="{width}" height="{height}" font-family="sans-serif" font-size="11"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {place}>'
    return (
        "\n".join([opening, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"])
        + "\n"
    )


def text(x: float, y: float, words: str, size: int = 11) -> str:
    return f'<text x="{x}" y="{y:.1f}" font-size="{size}">{escape(words)}</text>'


if __name__ == "__main__":
    *named, drawn = map(Path, sys.argv[1:])
    if "summary" in json.loads(named[0].read_text()):
        whole_commands(named, drawn)
    else:
        main(named[0], drawn)
