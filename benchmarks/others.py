"""Quantizes or decodes a checkpoint as users do without nf4conv, in a process of its own.

    python -m benchmarks.others quantize|dequantize|convert SOURCE OUT DEVICE

quantize: transformers with bitsandbytes. dequantize: transformers. convert: compressed-tensors.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def save_loaded(source: Path, out: Path, *, is_packed: bool = False, **options: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, **options
    )
    if not is_packed:
        model.hf_quantizer = model._weight_conversions = None  # saved as it is, not quantized again
    model.save_pretrained(out)


def quantize(source: Path, out: Path, device: str) -> None:
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    place = {"": device}
    save_loaded(source, out, is_packed=True, quantization_config=config, device_map=place)


def dequantize(source: Path, out: Path, _: str) -> None:
    if source.suffix == ".gguf":
        save_loaded(source.parent, out, gguf_file=source.name)
        return
    described = json.loads((source / "config.json").read_text())["quantization_config"]
    kinds = transformers.FineGrainedFP8Config, transformers.CompressedTensorsConfig
    config = kinds[described["quant_method"] != "fp8"](**described | {"dequantize": True})
    save_loaded(source, out, quantization_config=config)


def convert(source: Path, out: Path, _: str) -> None:
    from compressed_tensors.entrypoints import convert

    described = json.loads((source / "config.json").read_text())["quantization_config"]
    if described["quant_method"] == "fp8":
        converter = convert.FP8BlockDequantizer.from_pretrained(source)
    else:
        converter = convert.CompressedTensorsDequantizer(source)
    convert.convert_checkpoint(str(source), str(out), converter)


if __name__ == "__main__":
    how, source, out, device = sys.argv[1:]
    {"quantize": quantize, "dequantize": dequantize, "convert": convert}[how](
        Path(source), Path(out), device
    )
    status = Path("/proc/self/status").read_text()
    found = {"host_peak_bytes": 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])}
    if torch.cuda.is_available():
        found["device_peak_bytes"] = torch.cuda.max_memory_reserved()
    print("\n" + json.dumps(found))
