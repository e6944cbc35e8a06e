"""Shows for a denoiser that our checkpoint is the model that diffusers quantizes itself.

diffusers asks for a GPU before it quantizes or loads; without one that question is not asked here,
and bitsandbytes computes on the CPU.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_denoisers import Denoiser

import nf4conv


@dataclass(frozen=True)
class Roundtrip:
    """Three 4-bit models of one source.

    Attributes:
        ours: read from our output.
        theirs: quantized by diffusers on the fly, with our skip list.
        alone: quantized by diffusers on the fly, without a skip list.
    """

    ours: torch.nn.Module
    theirs: torch.nn.Module
    alone: torch.nn.Module

    @property
    def kept(self) -> frozenset[str]:
        """Returns the modules that diffusers packs by itself and we keep, with N for the numbers in
        their names.
        """
        return fold(packed(self.alone).keys() - packed(self.ours).keys())


def ask_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let diffusers quantize and load on the CPU, where there is nothing else."""
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    if not torch.cuda.is_available():
        monkeypatch.setattr(
            BnB4BitDiffusersQuantizer, "validate_environment", lambda *_, **__: None
        )
        monkeypatch.setattr(BnB4BitDiffusersQuantizer, "update_device_map", lambda *_: {"": "cpu"})


def quantize_both_ways(
    denoiser: Denoiser, folder: Path, stored: torch.dtype = torch.bfloat16, dtype: str | None = None
) -> Roundtrip:
    """Make a denoiser, save and quantize it.

    Args:
        denoiser: what to make.
        folder: where to.
        stored: dtype of the source.
        dtype: as for `--dtype`.
    """
    import diffusers

    source, out = folder / "source", folder / "out"
    denoiser.make().to(stored).save_pretrained(source)
    # the CPU's nested codes are not CUDA's
    nf4conv.quantize(source, out, double_quant=False, dtype=dtype, device="cpu")
    kind = getattr(diffusers, denoiser.name)
    return Roundtrip(
        kind.from_pretrained(out, torch_dtype=torch.bfloat16),
        own_quantization(diffusers, kind, source, skip_modules(out), double_quant=False),
        own_quantization(diffusers, kind, source, None, double_quant=False),
    )


def own_quantization(
    library: Any, kind: Any, folder: Path, skip: list[str] | None, *, double_quant: bool = True
) -> torch.nn.Module:
    """Quantizes a source with diffusers or transformers while it is loaded."""
    config = library.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=double_quant,
        llm_int8_skip_modules=skip,
    )
    return kind.from_pretrained(folder, torch_dtype=torch.bfloat16, quantization_config=config)


def skip_modules(folder: Path) -> list[str]:
    listed: list[str] = json.loads((folder / "config.json").read_bytes())["quantization_config"][
        "llm_int8_skip_modules"
    ]
    return listed


def packed(model: torch.nn.Module) -> dict[str, Any]:
    """The 4-bit modules, by path."""
    import bitsandbytes

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    }


def unequal(ours: torch.nn.Module, theirs: torch.nn.Module) -> list[str]:
    """Modules that only one of them has packed, or whose codes or scales differ, and other tensors
    that do.
    """
    one, other = packed(ours), packed(theirs)
    parts = dict(theirs.named_parameters())
    return [
        *(one.keys() ^ other.keys()),
        *(
            path
            for path in one.keys() & other.keys()
            if not _same_weight(one[path].weight, other[path].weight)
        ),
        *(
            name
            for name, value in ours.named_parameters()
            if name.removesuffix(".weight") not in one and not _same(value, parts[name])
        ),
    ]


def _same_weight(one: Any, other: Any) -> bool:
    return _same(one.data, other.data) and _same(one.quant_state.absmax, other.quant_state.absmax)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def output(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The output for inputs. In training mode: bitsandbytes' kernel for CPU inference takes no tiny
    layer.
    """
    model.train()
    device = next(model.parameters()).device
    torch.manual_seed(0)  # of dropout
    with torch.no_grad():
        found = model(**_on(device, inputs), return_dict=False)[0]
    return found[0] if isinstance(found, list) else found


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on(device, part) for key, part in value.items()}
    if isinstance(value, list):
        return [_on(device, part) for part in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def fold(paths: Iterable[str]) -> frozenset[str]:
    """Paths with their numbers as N."""
    return frozenset(re.sub(r"(?<=\.)\d+(?=\.|$)", "N", path) for path in paths)
