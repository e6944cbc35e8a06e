"""Writes the small checkpoints, results and adapters that the fuzzing target mutates."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import EXPERTS, save_adapter, write_mixture, write_source
from click.testing import CliRunner
from four_bit import pack
from four_bit import write as write_packed
from integers import Weight
from test_encoded import PLAIN, Q
from test_encoded import random as random_weight
from test_encoded import write as write_encoded

from nf4conv.cli import main as command_line
from nf4conv.output.folder import OutputFolder

UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
CARD = "---\nlicense: mit\nlanguage:\n- en\ntags: [a, b]\n---\n# A model\n"
PART_OPTIONS = ("--max-shard-size", "60kB")


def run(*arguments: object) -> Any:
    """Runs a command in this process; with few threads, if it takes such options."""
    words = [str(argument) for argument in arguments]
    if words[0] != "inspect":
        words += ["--device", "cpu"]
    if words[0] not in ("inspect", "evaluate"):
        words += ["--workers", "1"]
    return CliRunner().invoke(command_line, words, catch_exceptions=False)


def done(*arguments: object) -> None:
    """Runs a command that must succeed."""
    finished = run(*arguments)
    assert finished.exit_code == 0, finished.output


def plain(folder: Path) -> None:
    write_source(folder, layers=2)
    (folder / "README.md").write_text(CARD)


def pickled(folder: Path, *, shards: int = 1) -> None:
    state = PLAIN | {
        f"{Q}.weight": random_weight(64, 64).bfloat16().t(),
        UP: random_weight(128, 64)[32:96],
    }
    write_encoded(folder, {"a": torch.ones(1)})
    (folder / "model.safetensors").unlink()
    files = {name: f"pytorch_model-{number % shards:05d}.bin" for number, name in enumerate(state)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in state.items() if files[name] == file}
        torch.save(part, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )


def four_bit(folder: Path, **options: Any) -> None:
    head = {"lm_head.weight": torch.ones(256, 64).bfloat16()}
    up = pack(UP, torch.randn(64, 128).bfloat16(), **options)
    down = pack(DOWN, torch.randn(128, 64).bfloat16(), **options)
    write_packed(folder, up | head, down)


def own(folder: Path) -> None:
    """Writes a result, and its source as the sub-folder `original`."""
    source = folder.with_name("own source")
    plain(source)
    done("quantize", source, folder)
    source.rename(folder / "original")


def diffusers(folder: Path) -> None:
    folder.mkdir()
    parts = {
        "text_encoder": ["transformers", "LlamaModel"],
        "tokenizer": ["transformers", "LlamaTokenizer"],
    }
    write_source(folder / "text_encoder", layers=2)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/vocab.json").write_text("{}")
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "StableDiffusionPipeline", **parts})
    )
    (folder / "README.md").write_text(CARD)


def encoded(encode: Callable[[], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        made = encode()
        write_encoded(folder, PLAIN | made.stored, made.description)
        if made.description and made.description.get("quant_method") == "modelopt":
            (folder / "hf_quant_config.json").write_text(
                json.dumps({"quantization": made.description})
            )

    return write


def integers(description: dict[str, Any], *makes: Callable[..., Weight]) -> Callable[[Path], None]:
    """Returns what writes a checkpoint whose weights these functions quantize in turn."""

    def write(folder: Path) -> None:
        stored = dict(PLAIN)
        for number, make in enumerate(makes):
            module = f"model.layers.{number}.self_attn.q_proj"
            stored.pop(f"{module}.weight", None)
            weight = make(64, 128)
            stored |= {f"{module}.{name}": part for name, part in weight.parts.items()}
        write_encoded(folder, stored, description)

    return write


def quark_mxfp4(folder: Path) -> None:
    stored = {
        DOWN: torch.randint(0, 256, (64, 64)).byte(),
        f"{DOWN}_scale": torch.randint(110, 130, (64, 4)).byte(),
    }
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    description = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    write_encoded(folder, PLAIN | stored, description)


def torchao(folder: Path) -> None:
    stored = {
        f"{DOWN.replace('.weight', '')}._weight_qdata": torch.randint(-128, 127, (64, 128)).char(),
        f"{DOWN.replace('.weight', '')}._weight_scale": torch.rand(64, 4),
        f"{DOWN.replace('.weight', '')}._weight_zero_point": torch.ones(64, 4).char(),
    }
    description = {"quant_method": "torchao", "quant_type": {"_type": "Int8WeightOnlyConfig"}}
    write_encoded(folder, PLAIN | stored, description)


# --- adapters -------------------------------------------------------------------------------------


def adapter(folder: Path) -> None:
    """Writes a model as `base`, and as `adapter` one that changes a module and replaces a norm."""
    folder.mkdir()
    plain(folder / "base")
    place = "base_model.model.model.layers.0.mlp.up_proj"
    tensors = {
        f"{place}.lora_A.weight": torch.randn(4, 128),
        f"{place}.lora_B.weight": torch.randn(512, 4),
        f"{place}.lora_magnitude_vector": torch.rand(512),
        "base_model.model.model.layers.0.input_layernorm.weight": torch.ones(64),
    }
    config = {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["up_proj"],
        "use_dora": True,
        "use_rslora": False,
        "rank_pattern": {"up_proj": 4},
        "alpha_pattern": {"^model.*up_proj": 16, r"(self_attn|mlp)\.[a-z]+_proj": 2},
    }
    _write_adapter(folder / "adapter", tensors, config)


def adapter_of_experts(folder: Path) -> None:
    """Writes a mixture as `base`, and as `adapter` one that changes its fused experts."""
    folder.mkdir()
    write_mixture(folder / "base")
    place = "base_model.model.model.layers.0.mlp.experts"
    tensors = {
        f"{place}.lora_A.weight": torch.randn(2 * EXPERTS, 64),
        f"{place}.lora_B.weight": torch.randn(64, 2 * EXPERTS),
    }
    config = {"r": 2, "lora_alpha": 4, "target_parameters": ["mlp.experts.gate_up_proj"]}
    _write_adapter(folder / "adapter", tensors, config)


def _write_adapter(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]
) -> None:
    described = {"peft_type": "LORA", **config}
    save_adapter(folder, tensors, described)
    (folder / "README.md").write_text("# An adapter\n")


# --- results, whole and unfinished ----------------------------------------------------------------


def finished(folder: Path) -> None:
    """Writes a `source`, and as `out` what was made of it."""
    folder.mkdir()
    plain(folder / "source")
    done("quantize", folder / "source", folder / "out", *PART_OPTIONS)
    shutil.copytree(folder / "out", folder / "expected")


def packed_experts(folder: Path) -> None:
    folder.mkdir()
    write_mixture(folder / "source")
    done("quantize", folder / "source", folder / "out", *PART_OPTIONS, "--moe", "packed")
    shutil.copytree(folder / "out", folder / "expected")


def unfinished(folder: Path) -> None:
    """Writes a `source`, what two parts made of it, and a run that ended before its last files."""
    finished(folder)
    shutil.rmtree(folder / "out")
    parts = ("quantize", folder / "source", folder / "parts", *PART_OPTIONS, "--part")
    done(*parts, "1/2")
    complete = OutputFolder.complete

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    OutputFolder.complete = stop  # type: ignore[method-assign,assignment]
    run(*parts, "2/2")
    run("quantize", folder / "source", folder / "interrupted", *PART_OPTIONS)
    OutputFolder.complete = complete  # type: ignore[method-assign]
    assert (folder / "interrupted/.nf4conv/run.json").is_file()
    assert not (folder / "interrupted/config.json").exists()


# --- models that run ------------------------------------------------------------------------------


def runnable(folder: Path) -> None:
    """Writes a `source` that transformers can run, what was made of it, and token ids."""
    folder.mkdir()
    settings = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(settings).bfloat16()
    model.save_pretrained(folder / "source")
    np.save(folder / "source/ids.npy", np.arange(256, dtype=np.int32) * 37 % 96)
    done("quantize", folder / "source", folder / "out")
