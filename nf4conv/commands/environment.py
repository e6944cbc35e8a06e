"""`nf4conv env`: versions, GPUs, who would compute, and where things are kept."""

import platform
from typing import Final

from nf4conv.report.results import Environment
from nf4conv.run.loop import cores
from nf4conv.run.without_torch.bundle import kernel_folder, version_of

_PACKAGES: Final = (
    *(
        "torch",
        "triton",
        "numpy",
        "huggingface_hub",
        "click",
        "tqdm",
        "pyyaml",
        "safetensors",
        "transformers",
    ),
    *("accelerate", "bitsandbytes", "peft", "diffusers", "vllm"),
)


def environment() -> Environment:
    """What a bug report should say; importing torch takes seconds."""
    from huggingface_hub import constants  # importing huggingface_hub takes a while

    gpus, engine = _computing()
    folders = {"kernels": str(kernel_folder()), "downloads": str(constants.HF_HUB_CACHE)}
    packages = {name: version_of(name) or None for name in _PACKAGES}
    return Environment(
        platform.python_version(), platform.platform(), packages, cores(), gpus, engine, folders
    )


def _computing() -> tuple[tuple[str, ...], str]:
    """The GPUs that torch finds; then what computes where, and why."""
    try:
        import torch

        from nf4conv.codec.backends import why_plain  # importing torch takes seconds
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is what is to be shown
        return (), f"none: torch cannot be imported: {type(error).__name__}: {error}"
    if not torch.cuda.is_available():
        is_gpu_build = torch.version.cuda or torch.version.hip
        return (
            (),
            f"CPU code: {'torch finds no GPU' if is_gpu_build else 'this torch is a CPU build'}",
        )
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = tuple(
        f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.total_memory / 1e9:.1f} GB" for gpu in found
    )
    why = why_plain(None if torch.version.hip else (found[0].major, found[0].minor))
    return (
        gpus,
        f"plain torch on cuda:0: {why}"
        if why
        else "CUDA kernels on cuda:0: GPU and Triton are new enough",
    )
