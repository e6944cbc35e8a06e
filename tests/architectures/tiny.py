"""Tiny random checkpoints of any architecture that the installed transformers knows, and inputs for
their models.

Sizes are multiples of 64 (columns) and 32 (rows): bitsandbytes' CPU kernels decode other weights
wrongly or not at all.
"""

import inspect
import json
import lzma
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

RECORDED: dict[str, dict[str, Any]] = json.loads(
    lzma.decompress(Path(__file__).with_name("decisions.json.xz").read_bytes())
)
"""By architecture, the config of a tiny model, and what test_decisions.py compares."""


def readable(value: Any) -> Any:
    """Returns part of a config of transformers 5 as every release reads it: with numbers that JSON
    lacks, and with the old name of what turns positions.
    """
    if isinstance(value, list):
        return [readable(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "__float__" in value:
        return float(value["__float__"])
    found = {key: readable(one) for key, one in value.items()}
    if transformers.__version__ < "5" and "mrope_section" in (found.get("rope_parameters") or {}):
        found["rope_scaling"] = found["rope_parameters"]
    return found


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def tiny_config(architecture: str) -> "transformers.PreTrainedConfig":
    config_class = getattr(transformers, architecture).config_class
    return config_class.from_dict(readable(RECORDED[architecture]["config"]))


def tiny_model(architecture: str) -> "transformers.PreTrainedModel":
    """A random bfloat16 model; the same on every call."""
    config = tiny_config(architecture)
    torch.manual_seed(0)
    with default_dtype(torch.bfloat16):  # what a model wants in float32 it asks for, and gets
        model = getattr(transformers, architecture)(config).eval()
    float32 = re.compile("|".join(model._keep_in_fp32_modules_strict or ["$^"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and not weight.any():
                # bitsandbytes' CPU code encodes a block of zeros as its CUDA code
                # does not
                weight.normal_(std=0.02)
            if float32.search(name):
                weight.data = weight.data.float()
    return model


def save_tiny(architecture: str, folder: Path) -> Path:
    """A checkpoint of it, in FOLDER/source."""
    source = folder / "source"
    tiny_model(architecture).save_pretrained(source)
    if architecture == "Qwen2_5OmniForConditionalGeneration":
        torch.save({}, source / "spk_dict.pt")  # its voices, which from_pretrained insists on
    return source


def tiny_inputs(model: "transformers.PreTrainedModel") -> dict[str, torch.Tensor]:
    """Something to run a model on: words, a picture or sound, whatever it takes first."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    words = torch.randint(3, 300, (2, 16), generator=generator)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    main = model.main_input_name
    if main in ("pixel_values", "pixel_values_videos"):
        part = getattr(config, "vision_config", config)
        size = getattr(part, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs = {"pixel_values": noise(2, getattr(part, "num_channels", 3), height, width)}
    elif main == "input_features":
        mels = getattr(config, "num_mel_bins", 16)
        inputs = {"input_features": noise(2, mels, 128)}
    elif main == "input_values":
        inputs = {"input_values": noise(2, 4000)}
    else:
        inputs = {main: words}
    parameters = inspect.signature(model.forward).parameters
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = words
    if "input_ids" in parameters and "pixel_values" in inputs and hasattr(config, "text_config"):
        inputs["input_ids"] = words
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs


def first_output(model: "transformers.PreTrainedModel") -> torch.Tensor:
    inputs = tiny_inputs(model.eval())
    torch.manual_seed(2)  # some models draw masks
    with torch.no_grad():
        outputs = model(**inputs, return_dict=True)
    return next(
        value
        for value in outputs.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )
