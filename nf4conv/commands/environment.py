"""`nf4conv env`: versions, GPUs, what would compute, what loads, and where things are kept."""

import platform
from typing import Final

from nf4conv.report.results import Environment
from nf4conv.run.device.on_driver.kernels import version_of
from nf4conv.system.files import cache_folder
from nf4conv.system.machine import usable_cores
from nf4conv.version import __version__

_PACKAGES: Final = (
    *("torch", "triton", "numpy", "huggingface_hub", "click", "tqdm", "pyyaml", "safetensors"),
    *("transformers", "accelerate", "bitsandbytes", "peft", "diffusers", "vllm"),  # load results
)


def environment() -> Environment:
    """Describes this machine and its software, for a bug report.

    Imports torch, which takes seconds.

    Returns:
        Versions, GPUs, what would compute, and where compiled kernels and downloads are kept. A
        broken installation of torch is described, not raised.

    Example:
        >>> nf4conv.environment().values["GPUs"]
        'NVIDIA H200, 9.0, 150.1 GB'
    """
    from huggingface_hub import constants  # importing huggingface_hub takes a while

    try:
        from nf4conv.inference.moe.entry import status  # not every import of nf4conv is to act
    except ImportError:
        experts = "not active: this copy of nf4conv has no nf4conv.inference"
    else:
        experts = status()
    gpus, engine = _computing()
    return Environment(
        {
            "nf4conv": __version__,
            "python": platform.python_version(),
            **{name: version_of(name) or "not installed" for name in _PACKAGES},
            "platform": platform.platform(),
            "cores": str(len(usable_cores())),
            "GPUs": "; ".join(gpus) or "none",
            "--device auto": engine,
            "4-bit experts": experts,
            "folder of kernels": str(cache_folder()),
            "folder of downloads": str(constants.HF_HUB_CACHE),
        }
    )


def _computing() -> tuple[tuple[str, ...], str]:
    """Returns the GPUs that torch finds, and what `--device auto` would compute with, and why."""
    try:
        import torch

        from nf4conv.codec.backends import why_plain  # importing torch takes seconds
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        return (), f"none: torch cannot be imported: {type(error).__name__}: {error}"
    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            return (), "CPU code: torch finds no GPU"
        return (), "CPU code: this torch is a CPU build"
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = tuple(
        f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.total_memory / 1e9:.1f} GB" for gpu in found
    )
    why = why_plain(None if torch.version.hip else (found[0].major, found[0].minor))
    if why:
        return gpus, f"plain torch on cuda:0: {why}"
    return gpus, "CUDA kernels on cuda:0: GPU and Triton are new enough"
