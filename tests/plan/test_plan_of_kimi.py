"""Plans of Kimi K2.6's layout, 208,000 tensors of which experts are in INT4, in bounded memory."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

WIDTH, INNER, WORDS, EXPERTS, LAYERS = 7168, 2048, 163_840, 384, 61
BYTES = {"BF16": 2, "F32": 4, "I32": 4}
MOST_MEMORY = 300 * 2**20
MOST_SECONDS = 8  # of a processor; 2.9 to 4.5 were measured on one that others used too

PROGRAM = """
import re, sys, time
from nf4conv.cli.main import main
main(sys.argv[1:], standalone_mode=False)
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print(time.process_time(), peak, file=sys.stderr)
"""

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 32, "dynamic": False,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
}  # fmt: skip
CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "kimi_k2",
        "num_hidden_layers": LAYERS,
        "n_routed_experts": EXPERTS,
        "vocab_size": WORDS,
        "quantization_config": QUANTIZATION,
    },
    "vision_config": {"vt_hidden_size": 1152},
}


def tensors() -> Iterator[tuple[str, str, list[int]]]:
    """Yields name, dtype and shape of the text model's tensors."""
    for name in ("model.embed_tokens", "lm_head"):
        yield f"language_model.{name}.weight", "BF16", [WORDS, WIDTH]
    mlp = {"gate_proj": [INNER, WIDTH], "up_proj": [INNER, WIDTH], "down_proj": [WIDTH, INNER]}
    for layer in range(LAYERS):
        above = f"language_model.model.layers.{layer}"
        yield f"{above}.input_layernorm.weight", "BF16", [WIDTH]
        attention = {
            "q_a_proj": [1536, WIDTH], "q_b_proj": [12288, 1536],
            "kv_a_proj_with_mqa": [576, WIDTH], "kv_b_proj": [16384, 512], "o_proj": [WIDTH, 8192],
        }  # fmt: skip
        for name, shape in attention.items():
            yield f"{above}.self_attn.{name}.weight", "BF16", shape
        dense = f"{above}.mlp" if layer == 0 else f"{above}.mlp.shared_experts"
        for name, shape in mlp.items():
            yield f"{dense}.{name}.weight", "BF16", shape
        if layer == 0:
            continue
        yield f"{above}.mlp.gate.weight", "BF16", [EXPERTS, WIDTH]
        yield f"{above}.mlp.gate.e_score_correction_bias", "F32", [EXPERTS]
        for expert in range(EXPERTS):
            for name, (rows, columns) in mlp.items():
                path = f"{above}.mlp.experts.{expert}.{name}"
                yield f"{path}.weight_packed", "I32", [rows, columns // 8]
                yield f"{path}.weight_scale", "BF16", [rows, columns // 32]
                yield f"{path}.weight_shape", "I32", [2]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint; its files have holes where weights would be."""
    folder = tmp_path_factory.mktemp("kimi")
    everything = list(tensors())
    assert len(everything) > 208_000
    weight_map = {}
    for start in range(0, len(everything), 4000):
        file = f"model-{start:06d}.safetensors"
        entries, position, shapes = {}, 0, {}
        for name, dtype, shape in everything[start : start + 4000]:
            size = BYTES[dtype]
            for length in shape:
                size *= length
            entries[name] = {
                "dtype": dtype, "shape": shape, "data_offsets": [position, position + size],
            }  # fmt: skip
            if name.endswith("_shape"):
                sizes = (WIDTH, INNER) if "down" in name else (INNER, WIDTH)
                shapes[position] = struct.pack("<2i", *sizes)
            position += size
        header = json.dumps(entries).encode()
        with (folder / file).open("wb") as output:
            output.write(len(header).to_bytes(8, "little") + header)
            output.truncate(8 + len(header) + position)
            for place, value in shapes.items():
                output.seek(8 + len(header) + place)
                output.write(value)
        weight_map |= dict.fromkeys(entries, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "words",
    [("inspect",), ("dequantize", "OUT", "--dry-run"), ("quantize", "OUT", "--dry-run")],
    ids=lambda words: words[0],
)
def test_a_plan_is_quick_and_small(kimi: Path, tmp_path: Path, words: tuple[str, ...]):
    command, *others = (str(tmp_path / "out") if word == "OUT" else word for word in words)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command, str(kimi), *others],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, kilobytes = map(float, done.stderr.split()[-2:])
    print(f"{command}: {seconds:.1f} s of processor, {kilobytes / 1000:.0f} MB")
    assert kilobytes * 1024 < MOST_MEMORY
    assert seconds < MOST_SECONDS
