"""Runs a session of the command line on a small language model, and draws it.

The model has random weights, and the proportions of an 8B Llama: 13 % of its parameters are in the
embedding and the output head, which stay in 16 bits.

Writes docs/terminal.svg.

Usage: python docs/terminal.py
"""

import html
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "tie_word_embeddings": False,
}
COMMANDS = (
    "nf4conv quantize ./my-llama ./my-llama-nf4 --verify",
    "nf4conv verify ./my-llama-nf4 --source ./my-llama --report report.html",
    "nf4conv inspect ./my-llama-nf4 | head -2",
    "nf4conv quantize ./my-llama ./my-llama-nf4 --verify | head -1",
)
WIDTH = 104  # characters in a line
LINE = 19  # pixels from line to line
LABEL = "a terminal session: quantize, verify, inspect, and a rerun that has nothing to do"
STYLE = (
    "text { font: 13.2px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; "
    "fill: #d7dde8; white-space: pre } .typed { fill: #8fd0a8 }"
)


@dataclass(frozen=True)
class Line:
    """A line of the session. `is_typed` is true for a command, and false for what it printed."""

    is_typed: bool
    text: str


def session(folder: Path) -> list[Line]:
    """Runs the commands in a folder and returns the lines that a terminal would show."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL))
    model.to(torch.bfloat16).save_pretrained(folder / "my-llama")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    lines: list[Line] = []
    for command in COMMANDS:
        shell = ["bash", "-c", command]
        done = subprocess.run(
            shell, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        if lines:
            lines.append(Line(False, ""))
        lines.append(Line(True, f"$ {command}"))
        for printed in done.stdout.splitlines():
            starts = range(0, max(len(printed), 1), WIDTH)
            lines += [Line(False, printed[start : start + WIDTH]) for start in starts]
    return lines


def drawing(lines: list[Line]) -> str:
    """Returns the lines as SVG, readable on light and dark pages."""
    texts = []
    for index, line in enumerate(lines):
        kind = "typed" if line.is_typed else "said"
        top = 30 + LINE * index
        texts.append(f'<text x="16" y="{top}" class="{kind}">{html.escape(line.text)}</text>')
    rows = "\n".join(texts)
    width = WIDTH * 8 + 32
    height = 30 + LINE * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{LABEL}">\n'
        f"<style>{STYLE}</style>\n"
        '<rect width="100%" height="100%" rx="10" fill="#171c25"/>\n'
        f"{rows}\n</svg>\n"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        picture = drawing(session(Path(folder)))
    Path(__file__).with_name("terminal.svg").write_text(picture, encoding="utf-8")
