"""Measures rounding that knows the activations, beside other ways to make as small a model.

    python -m benchmarks.language_models /tmp/second          (once: trains the second model)
    python -m benchmarks.quality_calibrated NAME=MODEL:TEXT … --json FILE [--only METHODS]

Each MODEL is a causal model with bytes as tokens; TEXT is the kind of text that it has learnt
("python" or "english"). Calibration and evaluation take different parts of it, and the other kinds
are the foreign texts. All methods see the same windows and calibrate block by block and, within a
block, projection by projection, each on the inputs that what is rounded already gives. A ratio is
the mean divergence KL(original ‖ rounded) over that of NF4 with blocks of 64 and absmax, on the
same windows. Weights are decoded to bfloat16, and everything is computed in float32.

The methods run in this process, on matrices. `nf4conv quantize --calibrate` does the same from file
to file.
"""

import contextlib
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nf4conv
from benchmarks import int4_peers, language_models
from benchmarks.records import parser, save
from nf4conv.calibrate.moments import SecondMoments
from nf4conv.calibrate.rounding import (
    factor,
    round_calibrated,
    round_two_sided,
    search,
)
from nf4conv.codec.ops import dequantize_4bit, quantize_4bit

TEXTS = {
    "python": language_models.python,
    "english": language_models.english_held_out,
    "c": language_models.c_headers,
}
STAGES = {
    "llama": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ),
    "gpt_neox": (
        ("attention.query_key_value",),
        ("attention.dense",),
        ("mlp.dense_h_to_4h",),
        ("mlp.dense_4h_to_h",),
    ),
}
EVALUATED = 16384  # bytes of a model's own text
FOREIGN = 8192  # bytes of each other text
CALIBRATED = 65536  # bytes
CHUNK = 8192  # bytes at a time
SHIPPED = Path(nf4conv.__file__).parent / "calibrate" / "texts"


@dataclass
class Inputs:
    """What is known of the inputs of a stage."""

    moments: SecondMoments
    # Σ |x| of each input
    magnitude: torch.Tensor
    # moments of the gradients at the outputs, of each weight of the stage; if they are needed
    outputs: list[torch.Tensor]

    @classmethod
    def of(cls, in_features: int, outputs: list[torch.Tensor]) -> "Inputs":
        zeros = SecondMoments.zeros(in_features, torch.device("cpu"))
        return cls(zeros, torch.zeros(in_features), outputs)

    def add(self, x: torch.Tensor) -> None:
        self.moments.add(x)
        self.magnitude += x.abs().sum((0, 1))


Rounder = Callable[[list[torch.Tensor], Inputs | None], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Method:
    """A way to round the weights of a stage.

    Attributes:
        bits: of a weight.
        round: returns decoded weights, given those of a stage and its inputs.
        calibrates: True if it needs the inputs.
        knows_outputs: True if it needs the gradients at the outputs, too.
    """

    bits: float
    round: Rounder
    calibrates: bool
    knows_outputs: bool = False


def nf4_bits(blocksize: int) -> float:
    return 4 + 8 / blocksize + 32 / (256 * blocksize)


def data_free(quant_type: str, blocksize: int, scales: str) -> Method:
    def round_stage(weights: list[torch.Tensor], _: Inputs | None) -> list[torch.Tensor]:
        if scales == "search":
            return [search(weight, quant_type, blocksize).values() for weight in weights]
        return [
            dequantize_4bit(*quantize_4bit(weight, quant_type, blocksize, True))
            for weight in weights
        ]

    return Method(nf4_bits(blocksize), round_stage, calibrates=False)


def calibrated(quant_type: str, blocksize: int) -> Method:
    def round_stage(weights: list[torch.Tensor], inputs: Inputs | None) -> list[torch.Tensor]:
        assert inputs is not None
        of_inputs = factor(inputs.moments.mean(), blocksize)
        searched = [search(weight, quant_type, blocksize) for weight in weights]
        found = round_calibrated(weights, searched, of_inputs)
        return [one.values() for one in found]

    return Method(nf4_bits(blocksize), round_stage, calibrates=True)


def two_sided(quant_type: str, blocksize: int) -> Method:
    def round_stage(weights: list[torch.Tensor], inputs: Inputs | None) -> list[torch.Tensor]:
        assert inputs is not None
        of_inputs = factor(inputs.moments.mean(), blocksize)
        return [
            round_two_sided(
                weight, search(weight, quant_type, blocksize), of_inputs, outputs
            ).values()
            for weight, outputs in zip(weights, inputs.outputs, strict=True)
        ]

    return Method(nf4_bits(blocksize), round_stage, calibrates=True, knows_outputs=True)


def peer(name: str) -> Method:
    def round_stage(weights: list[torch.Tensor], inputs: Inputs | None) -> Sequence[torch.Tensor]:
        floats = [weight.float() for weight in weights]
        if name == "hqq":
            return [int4_peers.hqq(weight) for weight in floats]
        if name == "q4_k":
            return [int4_peers.q4_k(weight) for weight in floats]
        assert inputs is not None
        moments = inputs.moments.mean()
        if name == "gptq":
            return int4_peers.gptq(floats, moments)
        return int4_peers.awq(floats, moments, inputs.magnitude / inputs.moments.tokens)

    return Method(int4_peers.BITS[name], round_stage, calibrates=name in ("gptq", "awq"))


METHODS = {
    "NF4 64 absmax": data_free("nf4", 64, "absmax"),
    "NF4 64 search": data_free("nf4", 64, "search"),
    "NF4 64 J": calibrated("nf4", 64),
    "NF4 64 K": two_sided("nf4", 64),
    "NF4 32 J": calibrated("nf4", 32),
    "NF4 128 J": calibrated("nf4", 128),
    "GPTQ INT4 128": peer("gptq"),
    "AWQ INT4 128": peer("awq"),
    "Q4_K": peer("q4_k"),
    "HQQ INT4 64": peer("hqq"),
    "FP4 64 J": calibrated("fp4", 64),
    "NF4 32 absmax": data_free("nf4", 32, "absmax"),
    "NF4 32 search": data_free("nf4", 32, "search"),
    "NF4 128 absmax": data_free("nf4", 128, "absmax"),
    "NF4 128 search": data_free("nf4", 128, "search"),
    "FP4 64 absmax": data_free("fp4", 64, "absmax"),
    "FP4 64 search": data_free("fp4", 64, "search"),
}
BASE = "NF4 64 absmax"


class Subject:
    """A model, its texts, and what its original answers."""

    def __init__(self, folder: Path, own: str, texts: Sequence[str] = tuple(TEXTS)) -> None:
        import transformers

        self.own = own
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self.model.float().eval().requires_grad_(False)
        self.stages = STAGES[self.model.config.model_type]
        self.blocks = self.model.base_model.layers
        self.original = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.texts = {}
        for number, name in enumerate(texts):
            content = TEXTS[name]()
            size = FOREIGN
            if name == own:
                # what calibrates stands before, what judges behind
                content = content[len(content) // 2 :]
                size = EVALUATED
            self.texts[name] = self.windows(content, size, 100 + number)
        self.answers = {name: self.answer(ids) for name, ids in self.texts.items()}

    def calibration(self, text: str, seed: int) -> torch.Tensor:
        """Returns the windows that calibrate: of a kind of text, or of what nf4conv ships."""
        if text == "shipped":
            files = shipped()
            parts = [self.windows(file, CALIBRATED // len(files) + 1, seed) for file in files]
            return torch.cat(parts)
        content = TEXTS[text]()
        if text == self.own:
            content = content[: len(content) // 2]
        return self.windows(content, CALIBRATED, seed)

    def windows(self, text: bytes, size: int, seed: int) -> torch.Tensor:
        """Returns windows of a text, `size` bytes in all."""
        return language_models.windows(text, size // language_models.WINDOW, seed)

    def reset(self) -> None:
        self.model.load_state_dict(self.original)

    @torch.no_grad()
    def answer(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns log-probabilities, [windows, positions, 256]."""
        found = [
            self.model(part).logits.log_softmax(-1)
            for part in ids.split(CHUNK // language_models.WINDOW)
        ]
        return torch.cat(found)

    def measure(self) -> dict[str, dict[str, float]]:
        """Returns divergence, its 95 % interval over windows, and agreement, by text."""
        found = {}
        for name, ids in self.texts.items():
            before, after = self.answers[name], self.answer(ids)
            divergence = (before.exp() * (before - after)).sum(-1).mean(-1)
            found[name] = {
                "kl": float(divergence.mean()),
                "kl_half_interval": float(1.96 * divergence.std() / math.sqrt(len(divergence))),
                "agreement": float((before.argmax(-1) == after.argmax(-1)).float().mean()),
            }
        return found

    @torch.no_grad()
    def round(self, method: Method, ids: torch.Tensor | None) -> None:
        """Rounds all blocks in their order, with bfloat16 in the products of activations."""
        torch.set_float32_matmul_precision("medium")
        self.round_blocks(method, ids)
        torch.set_float32_matmul_precision("highest")

    def round_blocks(self, method: Method, ids: torch.Tensor | None) -> None:
        states = None
        gradients: dict[Any, SecondMoments] = {}
        if ids is not None and method.knows_outputs:
            gradients = self.gradients(ids)
        if ids is not None and method.calibrates:
            states = self.first_inputs(ids)
        for block in self.blocks:
            for names in self.stages:
                self.round_stage(block, names, method, states, gradients)
            if states is not None:
                for state in states:
                    state[0] = run(block, state)

    @torch.enable_grad()
    def gradients(self, ids: torch.Tensor) -> dict[Any, SecondMoments]:
        """Returns the moments of the gradients at the outputs of each projection.

        The loss is that of labels which the original draws. One pass back through all blocks.
        """
        found = {}
        hooks = []
        for block in self.blocks:
            for names in self.stages:
                for module in map(block.get_submodule, names):
                    found[module] = SecondMoments.zeros(module.out_features, torch.device("cpu"))
                    hooks.append(module.register_full_backward_hook(add_gradient(found[module])))
        generator = torch.Generator().manual_seed(0)
        embeddings = self.model.get_input_embeddings()
        hooks.append(embeddings.register_forward_hook(lambda _, __, out: out.requires_grad_()))
        for part in ids.split(CHUNK // language_models.WINDOW):
            said = self.model(part).logits.log_softmax(-1)
            chances = said.detach().exp().flatten(0, 1)
            drawn = torch.multinomial(chances, 1, generator=generator)
            (-said.flatten(0, 1).gather(1, drawn).sum()).backward()
        for hook in hooks:
            hook.remove()
        return found

    def round_stage(
        self,
        block: Any,
        names: Sequence[str],
        method: Method,
        states: list[Any] | None,
        gradients: dict[Any, SecondMoments],
    ) -> None:
        modules = [block.get_submodule(name) for name in names]
        inputs = None
        if states is not None:
            outputs = [gradients[module].mean() for module in modules if module in gradients]
            inputs = Inputs.of(modules[0].in_features, outputs)
            hook = modules[0].register_forward_pre_hook(lambda _, seen: inputs.add(seen[0]))
            for state in states:
                run(block, state)
            hook.remove()
        weights = [module.weight.data.bfloat16() for module in modules]
        torch.set_float32_matmul_precision("highest")
        rounded = method.round(weights, inputs)
        torch.set_float32_matmul_precision("medium")
        for module, found in zip(modules, rounded, strict=True):
            module.weight.data = found.bfloat16().float()

    def first_inputs(self, ids: torch.Tensor) -> list[Any]:
        """Returns the hidden states that enter the first block, with its other arguments."""
        found: list[Any] = []

        def keep(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            named = dict(named)
            hidden = given[0] if given else named.pop("hidden_states")
            for name in ("past_key_values", "layer_past", "use_cache"):
                named.pop(name, None)
            found.append([hidden, named])
            raise StopIteration

        hook = self.blocks[0].register_forward_pre_hook(keep, with_kwargs=True)
        for part in ids.split(CHUNK // language_models.WINDOW):
            with contextlib.suppress(StopIteration):
                self.model(part)
        hook.remove()
        return found


def add_gradient(moments: SecondMoments) -> Callable[..., None]:
    def add(_: object, __: object, gradients: tuple[torch.Tensor, ...]) -> None:
        moments.add(gradients[0])

    return add


def run(block: Any, state: list[Any]) -> torch.Tensor:
    out = block(state[0], **state[1])
    return out[0] if isinstance(out, tuple) else out


def shipped() -> list[bytes]:
    """Returns the texts that nf4conv ships, a chat as lines of its roles."""
    found = []
    for file in sorted(SHIPPED.glob("*.jsonl")):
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found.append("\n\n".join(plain(record) for record in records).encode())
    return found


def plain(record: dict[str, Any]) -> str:
    if "text" in record:
        return str(record["text"])
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in record["messages"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("models", nargs="+", metavar="NAME=MODEL:TEXT")
    options.add_argument("--only", help="names of methods, with commas between")
    options.add_argument("--texts", default="own", help="what calibrates: own, shipped, python, …")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    methods = chosen.only.split(",") if chosen.only else list(METHODS)
    rows: list[dict[str, Any]] = []
    for described in chosen.models:
        name, _, rest = described.partition("=")
        folder, _, own = rest.rpartition(":")
        subject = Subject(Path(folder), own)
        for method in methods:
            for text in chosen.texts.split(","):
                kind = own if text == "own" else text
                row = measured(subject, method, kind, chosen.seed)
                rows.append({"model": name, "method": method, **row})
                print(json.dumps(rows[-1]), flush=True)
                save(chosen, seed=chosen.seed, bytes_calibrated=CALIBRATED, rows=rows)
        del subject
        gc.collect()
    print_table(rows)


def measured(subject: Subject, method: str, text: str, seed: int) -> dict[str, Any]:
    chosen = METHODS[method]
    subject.reset()
    start = time.process_time()
    if chosen.calibrates:
        subject.round(chosen, subject.calibration(text, seed))
    else:
        subject.round(chosen, None)
    spent = time.process_time() - start
    return {
        "bits": chosen.bits,
        "calibrated_on": text if chosen.calibrates else None,
        "own_text": subject.own,
        "cpu_seconds": round(spent, 1),
        "texts": subject.measure(),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints divergence relative to BASE: a column for each model and text, its own text first."""
    columns = []
    for row in rows:
        if row["method"] == BASE:
            texts = sorted(row["texts"], key=lambda text: text != row["own_text"])
            columns += [(row, text) for text in texts]
    print("| | bits | " + " | ".join(f"{base['model']}, {text}" for base, text in columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    lines = []
    for kind in dict.fromkeys((row["method"], calibration(row)) for row in rows):
        of_kind = [row for row in rows if (row["method"], calibration(row)) == kind]
        cells = []
        for base, text in columns:
            found = [row for row in of_kind if row["model"] == base["model"]]
            ratio = found[0]["texts"][text]["kl"] / base["texts"][text]["kl"] if found else None
            cells.append("" if ratio is None else f"{ratio:.3f}")
        name = f"{kind[0]}, calibrated on {kind[1]}" if kind[1] else kind[0]
        row = " | ".join([name, f"{of_kind[0]['bits']:.3f}", *cells])
        first = next((cell for cell in cells if cell), "")
        lines.append((first, f"| {row} |"))
    for _, line in sorted(lines):
        print(line)


def calibration(row: dict[str, Any]) -> str:
    """Returns what calibrated a model; empty if its own kind of text did, or nothing."""
    on = row["calibrated_on"]
    return "" if on in (None, row["own_text"]) else str(on)


if __name__ == "__main__":
    main()
