"""Measures what calibrated rounding gains on a small Llama whose tokens are bytes.

    python -m benchmarks.calibration_quality MODEL [--windows 128] [--judged 48] [--json FILE]

It needs no checkpoint on disk in 4 bits: blocks are rounded in memory, stage by stage, each with
the inputs that come out of what is rounded already. Calibration text are Python sources of the
standard library; other sources of it, headers of C++ and prose are held out. The figure is the mean
divergence from the original's predictions, relative to that of NF4 with absmax in blocks of 64.
"""

import argparse
import contextlib
import json
import sysconfig
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import nf4conv
from nf4conv.calibrate import rounding

WINDOW = 512
STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
BATCH = 16

Method = Callable[[str, Sequence[torch.Tensor], torch.Tensor], list[torch.Tensor]]
"""Takes the name of a stage, its weights and the moments of their inputs; returns them decoded."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--judged", type=int, default=48)
    parser.add_argument("--prose", type=Path, help="a folder with .md or .jsonl files")
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    bench = Bench(arguments.model, arguments.device)
    texts = held_out(arguments.judged, arguments.prose)
    bench.judge_by({name: bench.windows(text) for name, text in texts.items()})
    calibration = bench.windows(python_text(arguments.windows, offset=0))
    rows = []
    gradients: dict[str, torch.Tensor] = {}
    if arguments.only in "K":
        gradients = bench.output_moments(calibration)
    for name, method in methods(gradients).items():
        if arguments.only and not name.startswith(("absmax 64", arguments.only)):
            continue
        start = time.perf_counter()
        bench.quantize(method, calibration)
        row: dict[str, object] = {"method": name, "seconds": time.perf_counter() - start}
        row |= bench.divergences()
        first = rows[0] if rows else row
        row |= {f"{text}, ratio": row[text] / first[text] for text in texts}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.json:
        about = {
            "model": arguments.model.name,
            "windows": arguments.windows,
            "judged": arguments.judged,
            "device": arguments.device,
        } | {name: version(name) for name in ("torch", "transformers")}
        arguments.json.write_text(json.dumps({"settings": about, "rows": rows}, indent=1) + "\n")


def methods(gradients: dict[str, torch.Tensor]) -> dict[str, Method]:
    found: dict[str, Method] = {
        "absmax 64": without_data("absmax", 64),
        "search 64": without_data("search", 64),
        "J 64": calibrated(64, "nf4"),
        "J 32": calibrated(32, "nf4"),
        "J 128": calibrated(128, "nf4"),
    }
    if gradients:
        found["K 64"] = two_sided(64, gradients)
        found["K 32"] = two_sided(32, gradients)
    found["J fp4"] = calibrated(64, "fp4")
    return found


def without_data(scales: str, blocksize: int) -> Method:
    def method(
        _stage: str, weights: Sequence[torch.Tensor], _moments: torch.Tensor
    ) -> list[torch.Tensor]:
        packed = [
            nf4conv.quantize_4bit(weight.bfloat16(), "nf4", blocksize, scales=scales)
            for weight in weights
        ]
        return [nf4conv.dequantize_4bit(*one) for one in packed]

    return method


def calibrated(blocksize: int, quant_type: str, sweeps: int = 4) -> Method:
    def method(
        _stage: str, weights: Sequence[torch.Tensor], moments: torch.Tensor
    ) -> list[torch.Tensor]:
        factor = rounding.factor(moments, blocksize)
        halves = [weight.bfloat16() for weight in weights]
        results = rounding.round_calibrated(halves, factor, quant_type, sweeps=sweeps)
        return [one.values() for one in results]

    return method


def two_sided(blocksize: int, gradients: dict[str, torch.Tensor], sweeps: int = 4) -> Method:
    def method(
        stage: str, weights: Sequence[torch.Tensor], moments: torch.Tensor
    ) -> list[torch.Tensor]:
        factor = rounding.factor(moments, blocksize)
        names = stage.split(",")
        return [
            rounding.round_two_sided(
                weight.bfloat16(), factor, gradients[name], sweeps=sweeps
            ).values()
            for name, weight in zip(names, weights, strict=True)
        ]

    return method


def python_text(windows: int, offset: int) -> bytes:
    """Returns Python sources; those of another offset are other files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return joined(files[offset::7], windows)


def held_out(windows: int, prose: Path | None) -> dict[str, bytes]:
    texts = {"python": python_text(windows, offset=3)}
    headers = sorted((Path(torch.__file__).parent / "include" / "ATen").glob("*.h"))
    texts["headers"] = joined(headers[::5], windows)
    if prose is not None:
        texts["prose"] = joined(sorted(prose.glob("*.md")), windows)
    return texts


def joined(files: Sequence[Path], windows: int) -> bytes:
    """Returns pieces of many files, so many windows in all."""
    size = windows * WINDOW
    each = max(WINDOW, size // max(1, len(files)) + WINDOW)
    parts = [file.read_bytes()[:each] for file in files if file.stat().st_size > WINDOW]
    return b"".join(parts)[:size]


class Bench:
    """A model, its original weights and its predictions."""

    def __init__(self, path: Path, device: str) -> None:
        self.device = device
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self.model = model.float().to(device).eval().requires_grad_(False)
        self.blocks = self.model.model.layers
        self.original = {name: one.clone() for name, one in self.model.state_dict().items()}
        self.texts: dict[str, torch.Tensor] = {}
        self.predictions: dict[str, list[torch.Tensor]] = {}

    def windows(self, text: bytes) -> torch.Tensor:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        count = len(tokens) // WINDOW
        return tokens[: count * WINDOW].view(count, WINDOW).to(self.device)

    @torch.no_grad()
    def predict(self, windows: torch.Tensor) -> list[torch.Tensor]:
        return [self.model(part).logits.log_softmax(-1) for part in windows.split(BATCH)]

    def judge_by(self, texts: dict[str, torch.Tensor]) -> None:
        self.texts = texts
        self.predictions = {name: self.predict(windows) for name, windows in texts.items()}

    def divergences(self) -> dict[str, float]:
        found = {}
        for name, windows in self.texts.items():
            total = 0.0
            for before, after in zip(self.predictions[name], self.predict(windows), strict=True):
                total += float((before.exp() * (before - after)).sum(dtype=torch.float64))
            found[name] = total / windows.numel()
        return found

    @torch.no_grad()
    def first_inputs(self, windows: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
        """Returns what goes into the first block, and the other arguments of blocks."""
        seen: list[tuple[torch.Tensor, dict[str, object]]] = []

        def stop(_: nn.Module, args: tuple[torch.Tensor], kwargs: dict[str, object]) -> None:
            names = ("attention_mask", "position_ids", "position_embeddings", "cache_position")
            seen.append((args[0], {name: kwargs[name] for name in names if name in kwargs}))
            raise StopIteration

        handle = self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
        with contextlib.suppress(StopIteration):
            self.model(windows, use_cache=False)
        handle.remove()
        return seen[0]

    @torch.no_grad()
    def quantize(self, method: Method, calibration: torch.Tensor) -> None:
        """Puts rounded weights in the place of the original ones, block by block."""
        self.model.load_state_dict(self.original)
        parts = [self.first_inputs(part) for part in calibration.split(BATCH)]
        for number, block in enumerate(self.blocks):
            for names in STAGES:
                moments = self.moments(block, names[0], parts)
                layers = [block.get_submodule(name) for name in names]
                stage = ",".join(f"{number}.{name}" for name in names)
                decoded = method(stage, [layer.weight for layer in layers], moments)
                for layer, values in zip(layers, decoded, strict=True):
                    layer.weight.copy_(values.float())
            parts = [(run(block, hidden, others), others) for hidden, others in parts]

    def moments(
        self,
        block: nn.Module,
        name: str,
        parts: Sequence[tuple[torch.Tensor, dict[str, object]]],
    ) -> torch.Tensor:
        layer = block.get_submodule(name)
        found = rounding.SecondMoments.zeros(layer.in_features, torch.device(self.device))

        def add(_: nn.Module, args: tuple[torch.Tensor]) -> None:
            found.add(args[0])

        handle = layer.register_forward_pre_hook(add)
        for hidden, others in parts:
            run(block, hidden, others)
        handle.remove()
        return found.mean()

    def output_moments(self, windows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the moments of the gradients at each output, for labels the model draws."""
        self.model.load_state_dict(self.original)
        generator = torch.Generator(self.device).manual_seed(0)
        found: dict[str, rounding.SecondMoments] = {}
        handles = [
            self.model.get_input_embeddings().register_forward_hook(
                lambda _module, _args, output: output.requires_grad_(True)
            )
        ]
        for number, block in enumerate(self.blocks):
            for name in [name for names in STAGES for name in names]:
                layer = block.get_submodule(name)
                moments = rounding.SecondMoments.zeros(
                    layer.out_features, torch.device(self.device)
                )
                found[f"{number}.{name}"] = moments
                handles.append(layer.register_forward_hook(listening(moments)))
        for part in windows.split(BATCH):
            predicted = self.model(part).logits.float().log_softmax(-1)
            drawn = torch.multinomial(
                predicted.detach().exp().flatten(0, 1), 1, generator=generator
            )
            (-predicted.flatten(0, 1).gather(-1, drawn).sum()).backward()
        for handle in handles:
            handle.remove()
        return {name: one.mean() for name, one in found.items()}


def listening(moments: rounding.SecondMoments) -> Callable[..., None]:
    """Returns a hook that adds the gradients of a layer's outputs to its moments."""

    def hook(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: moments.add(gradient.detach()))

    return hook


def run(block: nn.Module, hidden: torch.Tensor, others: dict[str, object]) -> torch.Tensor:
    output = block(hidden, **others)
    return output[0] if isinstance(output, tuple) else output


if __name__ == "__main__":
    main()
