"""Makes tiny checkpoints with another release of transformers, or loads our outputs with it and
compares them with what that release packs itself.

A Python that has that release runs this file:

    python in_another_transformers.py save FOLDER ARCHITECTURE ...
    python in_another_transformers.py load FOLDER
    python in_another_transformers.py resemble FOLDER
    python in_another_transformers.py expect FOLDER

`resemble` compares only with the source. It is for models of which that release packs less.
`expect` compares with what another release put out, in FOLDER/ARCHITECTURE/expected.pt.

FOLDER holds one folder for each architecture, named after its class, with "source" and "out" in it.
Both print a JSON object: architecture → "ok", "unknown to it", "cannot read the source either", or
what went wrong.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tiny import first_output, save_tiny, tiny_config
from transformers import BitsAndBytesConfig

LARGEST = 100_000_000
"""Parameters of a model that could not be made small."""


def save(folder: Path) -> str:
    if getattr(transformers, folder.name, None) is None:
        return "unknown to it"
    try:
        with torch.device("meta"):
            size = getattr(transformers, folder.name)(tiny_config(folder.name)).num_parameters()
        if size > LARGEST:
            return f"{size:,} parameters"
        save_tiny(folder.name, folder)
    except Exception as error:  # noqa: BLE001 its configs differ from ours
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "ok"


def load(folder: Path) -> str:
    model_class = getattr(transformers, folder.name, None)
    if model_class is None:
        return "unknown to it"
    try:
        # for what a release does not find under the names that another gave it
        torch.manual_seed(3)
        ours = model_class.from_pretrained(folder / "out", dtype=torch.bfloat16)
        method = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=ours.config.quantization_config.llm_int8_skip_modules,
        )
        torch.manual_seed(3)
        theirs = model_class.from_pretrained(
            folder / "source",
            config=config_of_source(model_class, folder / "source"),
            quantization_config=method,
            dtype=torch.bfloat16,
        )
    except Exception as error:  # noqa: BLE001 whatever it is, the table shows it
        message = f"{type(error).__name__}: {str(error)[:200]}"
        return (
            message if can_read(model_class, folder / "source") else "cannot read the source either"
        )
    return compare(ours, theirs)


def config_of_source(model_class: type, source: Path) -> "transformers.PretrainedConfig":
    """Reads a config; says of its rotary embeddings to transformers 4 what 5 wrote for itself.

    A result says it to both. transformers 4 would take its own defaults for the source. What the
    source itself says to transformers 4 stays, in both.
    """
    config = model_class.config_class.from_pretrained(source)
    stored = json.loads((source / "config.json").read_text())
    stored |= stored.get("text_config") or {}
    rope = getattr(config, "rope_parameters", None) or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope and key not in stored:
            setattr(config, key, rope[key])
    return config


def resemble(folder: Path) -> str:
    return correlated(output_of(folder, "source"), output_of(folder, "out"), 0.95)


def expect(folder: Path) -> str:
    try:
        found = output_of(folder, "out")
    except Exception as error:  # noqa: BLE001 whatever it is, the test shows it
        return f"{type(error).__name__}: {str(error)[:200]}"
    return correlated(torch.load(folder / "expected.pt"), found, 0.999)


def output_of(folder: Path, name: str) -> torch.Tensor:
    model_class = getattr(transformers, folder.name)
    return first_output(
        model_class.from_pretrained(folder / name, dtype=torch.bfloat16, device_map="cpu")
    )


def correlated(one: torch.Tensor, other: torch.Tensor, least: float) -> str:
    outputs = torch.stack([one.float().flatten(), other.float().flatten()])
    correlation = torch.corrcoef(outputs)[0, 1]
    return "ok" if correlation > least else f"a correlation of {correlation:.4f}"


def can_read(model_class: type, source: Path) -> bool:
    try:
        # with a device map, as every quantized model is loaded
        _, found = model_class.from_pretrained(
            source, dtype=torch.bfloat16, device_map="cpu", output_loading_info=True
        )
    except Exception:  # noqa: BLE001
        return False
    return not found["missing_keys"] and not found["mismatched_keys"]


def compare(ours: "transformers.PreTrainedModel", theirs: "transformers.PreTrainedModel") -> str:
    packed = packed_weights(ours)
    if not packed or packed.keys() != packed_weights(theirs).keys():
        return f"modules differ: {sorted(packed.keys() ^ packed_weights(theirs).keys())[:4]}"
    if stray := unpacked_modules(ours):
        return f"bytes in modules that do not unpack them, or none in one that does: {stray[:4]}"
    for path, weight in packed_weights(theirs).items():
        if not torch.equal(weight, packed[path]):
            return f"bytes differ: {path}"
    try:
        expected = first_output(theirs)
    except Exception:  # noqa: BLE001 the sweep has no inputs for this model
        return "ok"
    is_same = torch.equal(expected, first_output(ours)) or not expected.isfinite().all()
    return "ok" if is_same else "outputs differ"


def packed_weights(model: "transformers.PreTrainedModel") -> dict[str, torch.Tensor]:
    return {
        path: module.weight.data.view(-1)
        for path, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
        and getattr(module.weight, "quant_state", None) is not None
    }


def unpacked_modules(model: "transformers.PreTrainedModel") -> list[str]:
    """Modules with a weight of bytes, or of no quant state, that are taken for the other kind."""
    found = []
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_packed = isinstance(weight, torch.Tensor) and weight.dtype == torch.uint8
        if is_packed != (type(module).__name__ == "Linear4bit"):
            found.append(path)
    return found


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    command, folder, *names = sys.argv[1:]
    folders = [Path(folder, name) for name in names] or sorted(Path(folder).iterdir())
    commands = {"save": save, "load": load, "resemble": resemble, "expect": expect}
    answer = commands[command]
    print(json.dumps({path.name: answer(path) for path in folders}))
