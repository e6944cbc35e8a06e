"""`nf4conv env`: versions, GPUs, what would compute, what loads, and where things are kept."""

import platform
from typing import Final, NamedTuple

from nf4conv.report.results.contents import Environment
from nf4conv.run.device.on_driver.bundle import version_of
from nf4conv.system.cores import usable_cores
from nf4conv.system.kind import lacking
from nf4conv.system.private import cache_folder

_PACKAGES: Final = (
    # what nf4conv computes, downloads and shows with
    "torch",
    "triton",
    "numpy",
    "huggingface_hub",
    "click",
    "tqdm",
    "pyyaml",
    # what loads its results
    "safetensors",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "peft",
    "diffusers",
    "vllm",
)


def environment() -> Environment:
    """Describes this machine and its software, for a bug report.

    Imports torch, which takes seconds.

    Returns:
        Versions, GPUs, what would compute, and where compiled kernels and downloads are kept. A
        broken installation of torch is described, not raised.

    Example:
        >>> nf4conv.environment().gpus
        ('NVIDIA H200, 9.0, 150.1 GB',)
    """
    from huggingface_hub import constants  # importing huggingface_hub takes a while

    packages = {name: version_of(name) or None for name in _PACKAGES}
    folders = {"kernels": str(cache_folder()), "downloads": str(constants.HF_HUB_CACHE)}
    computing = _find_computing()
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages,
        cores=len(usable_cores()),
        gpus=computing.gpus,
        engine=computing.engine,
        folders=folders,
        lacking=lacking(),
        experts=_loader_of_experts(),
    )


def _loader_of_experts() -> str:
    """Says whether transformers loads 4-bit experts here."""
    try:
        from nf4conv.inference.moe.entry import status  # not every import of nf4conv is to act
    except ImportError:
        return "not active: this copy of nf4conv has no nf4conv.inference"
    return status()


class _Computing(NamedTuple):
    gpus: tuple[str, ...]  # name, compute capability and memory of each that torch finds
    engine: str  # what computes with --device auto, where, and why


def _find_computing() -> _Computing:
    """Finds the GPUs, and says what `--device auto` would compute with."""
    try:
        import torch

        from nf4conv.codec.backends import why_plain  # importing torch takes seconds
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        reason = f"{type(error).__name__}: {error}"
        return _Computing((), f"none: torch cannot be imported: {reason}")
    if not torch.cuda.is_available():
        is_gpu_build = torch.version.cuda or torch.version.hip
        reason = "torch finds no GPU" if is_gpu_build else "this torch is a CPU build"
        return _Computing((), f"CPU code: {reason}")
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    lines = []
    for gpu in found:
        memory = gpu.total_memory / 1e9
        lines.append(f"{gpu.name}, {gpu.major}.{gpu.minor}, {memory:.1f} GB")
    gpus = tuple(lines)
    capability = None if torch.version.hip else (found[0].major, found[0].minor)
    why = why_plain(capability)
    if why:
        return _Computing(gpus, f"plain torch on cuda:0: {why}")
    return _Computing(gpus, "CUDA kernels on cuda:0: GPU and Triton are new enough")
