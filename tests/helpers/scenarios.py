"""Commands that tests interrupt, and what they work on."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import pushed, save_model, write_mixture, write_source
from gguf_files import LLAMA, write_gguf
from safetensors.torch import load_file

# none of these imports the Hub's client, which must know the address of our server before
import nf4conv

OPTIONS = {"max_shard_size": 60_000}
RUN = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}

# serves a checkpoint as org/name until its stdin ends, and prints its address; for each name of a
# repository that it reads, it prints the hashes of the files in it
SERVER = """
import hashlib, json, sys
from pathlib import Path
from hub_server import HUB, Repo
repo = Repo()
repo.commit({path.name: path.read_bytes() for path in Path(sys.argv[1]).iterdir()})
HUB.repos["org/name"] = repo
print(HUB.url, flush=True)
for line in sys.stdin:
    what, name = line.split()
    found = HUB.repos.pop(name, None) if what == "forget" else HUB.repos.get(name)
    files = {} if found is None else found.files
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    print(json.dumps(sums), flush=True)
"""


@dataclass
class Scenario:
    """A command that is interrupted.

    Attributes:
        run: runs it into a folder.
        prepare: puts into the folder what was there before.
        mark: the file without which no loader takes the folder for a model.
        elsewhere: says what is wrong outside the folder: (the folder, whether all must be there).
    """

    run: Callable[[Path], Any]
    prepare: Callable[[Path], None] = lambda _: None
    mark: str = "config.json"
    elsewhere: Callable[[Path, bool], list[str]] = lambda *_: []


def scenario(name: str, folder: Path) -> Scenario:
    """Prepares a scenario in a folder."""
    source = write_source(folder / "source", layers=4)
    makers: dict[str, Callable[[Path, Path], Scenario]] = {
        "overwrite": overwriting,
        "dequantize": dequantizing,
        "pipeline": quantizing_pipeline,
        "push": pushing,
        "calibrated": calibrating,
        "experts": packing_experts,
        "gguf": reading_gguf,
        "integers": decoding_integers,
    }
    if name in makers:
        return makers[name](folder, source)
    place: str | Path = source
    where: dict[str, Any] = {}
    if name in ("stream", "streamed-parts"):
        start_server(source)
        place = "org/name"
        where = {"stream": True, "cache_dir": folder / "cache"}

    def quantize(out: Path) -> None:
        nf4conv.quantize(place, out, **OPTIONS, **RUN, **where)

    def quantize_in_parts(out: Path) -> None:
        for number in (2, 3, 1):
            part = {**RUN, "part": f"{number}/3"}
            nf4conv.quantize(place, out, **OPTIONS, **part, **where)

    scenarios = {
        "quantize": quantize,
        "stream": quantize,
        "parts": quantize_in_parts,
        "streamed-parts": quantize_in_parts,
    }
    return Scenario(scenarios[name])


def overwriting(folder: Path, source: Path) -> Scenario:
    old = folder / "old"
    nf4conv.quantize(source, old, **{**OPTIONS, "quant_type": "fp4"}, **RUN)

    def overwrite(out: Path) -> None:
        nf4conv.quantize(source, out, **OPTIONS, **RUN, overwrite=True)

    return Scenario(overwrite, prepare=lambda out: shutil.copytree(old, out))


def dequantizing(folder: Path, source: Path) -> Scenario:
    packed = folder / "packed"
    nf4conv.quantize(source, packed, **OPTIONS, **RUN)

    def dequantize(out: Path) -> None:
        nf4conv.dequantize(packed, out, max_shard_size=150_000, **RUN)

    return Scenario(dequantize)


def quantizing_pipeline(folder: Path, source: Path) -> Scenario:
    pipeline = write_pipeline(folder / "pipeline", source)

    def quantize(out: Path) -> None:
        nf4conv.quantize(pipeline, out, **OPTIONS, **RUN)

    return Scenario(quantize, mark="model_index.json")


def pushing(_: Path, source: Path) -> Scenario:
    """Each run that begins anew finds no repository, and pushes to the same one."""
    server = start_server(source)

    def ask(what: str) -> dict[str, str]:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{what} me/made\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    def prepare(__: Path) -> None:
        ask("forget")

    def push(out: Path) -> None:
        where = {"push_to_hub": "me/made", "token": "hf_writer"}
        nf4conv.quantize(source, out, **OPTIONS, **RUN, **where)

    def elsewhere(out: Path, must_be_whole: bool) -> list[str]:
        found = ask("show")
        found.pop(".gitattributes", None)
        if not found and not must_be_whole:
            return []
        made = pushed(out, "me/made").items()
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in made}
        sums = {name: digest for name, digest in sums.items() if ".nf4conv/" not in name}
        return [] if found == sums else [f"pushed: {sorted(found)}"]

    return Scenario(push, prepare, elsewhere=elsewhere)


def calibrating(folder: Path, _: Path) -> Scenario:
    import transformers

    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    source = folder / "model"
    model = transformers.LlamaForCausalLM(settings).bfloat16()
    model.save_pretrained(source, max_shard_size="60KB")
    text = folder / "ids.npy"
    np.save(text, np.arange(2048, dtype=np.int32) * 37 % 96)
    options = {**OPTIONS, "calibrate": str(text), "calibration_tokens": 512}

    def calibrate(out: Path) -> None:
        nf4conv.quantize(source, out, **options, **RUN)

    return Scenario(calibrate)


def packing_experts(folder: Path, _: Path) -> Scenario:
    source = write_mixture(folder / "mixture")
    options = {**OPTIONS, "moe": "packed", "max_shard_size": 12_000}

    def pack(out: Path) -> None:
        nf4conv.quantize(source, out, **options, **RUN)

    return Scenario(pack)


def reading_gguf(folder: Path, _: Path) -> Scenario:
    """config.json and the tokenizer are made of the metadata."""
    tokens = [f"token {number}" for number in range(5000)]
    spelled = {
        **LLAMA,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["t o"],
    }
    source = write_gguf(folder / "model.gguf", spelled, default="Q4_0")
    options = {**OPTIONS, "max_shard_size": 200_000}

    def quantize(out: Path) -> None:
        nf4conv.quantize(source, out, **options, **RUN)

    return Scenario(quantize)


def decoding_integers(folder: Path, plain: Path) -> Scenario:
    """The checkpoint of the other scenarios, quantized by GPTQ, back to 16 bits."""
    from integers import gptq  # it imports the Hub's client

    source = folder / "gptq"
    shutil.copytree(plain, source)
    (source / "model.safetensors.index.json").unlink()
    stored = {}
    for path in sorted(source.glob("*.safetensors")):
        stored |= load_file(path)
        path.unlink()
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        weight = gptq(*stored.pop(name).shape)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": values for part, values in weight.parts.items()}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    save_model(source, stored, config)

    def dequantize(out: Path) -> None:
        nf4conv.dequantize(source, out, max_shard_size=150_000, **RUN)

    return Scenario(dequantize)


def write_pipeline(folder: Path, source: Path) -> Path:
    """Writes a diffusers pipeline with two submodels that are copies of a checkpoint."""
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline"}
    folder.mkdir()
    for submodel in ("text_encoder", "text_encoder_2"):
        shutil.copytree(source, folder / submodel)
        index[submodel] = ["transformers", "LlamaModel"]
    (folder / "scheduler").mkdir()
    (folder / "scheduler/scheduler_config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def start_server(source: Path) -> subprocess.Popen[str]:
    """Starts a Hub in a process of its own, which ends with this one."""
    words = [sys.executable, "-c", SERVER, str(source)]
    here = Path(__file__).parent
    server = subprocess.Popen(
        words, cwd=here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    os.environ |= {
        "HF_ENDPOINT": server.stdout.readline().strip(),
        "HF_HOME": str(source.parent / "hub home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    return server
