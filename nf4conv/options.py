"""Declares the options of every command, each of them once. Imports no torch.

From a field come click's option (cli/parameters.py), the check of its value (declaring.py), the
keyword of the function in Python, and its line in docs/options.md. --help shows it in the `group`
of the class that declares it, or in one that the field names.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

from nf4conv.declaring import Checked, Option, option
from nf4conv.format.codebook import Blocksize, QuantType, Scales

Dtype: TypeAlias = Literal["bfloat16", "float16", "float32"]
Fp8Scales: TypeAlias = Literal["e8m0", "float32"]
Names: TypeAlias = tuple[str, ...] | list[str]
"""Several names; a class of options makes a tuple of them."""

DTYPES: Final = get_args(Dtype)

_SHARD_SIZE: Final = "Make no weight file larger. Several are written at a time."


def _is_part(part: str) -> bool:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    return match is not None and 1 <= int(match[1]) <= int(match[2])


def _device(text: str, group: str = "") -> Any:
    expected = "auto, cpu, cuda or cuda:N (cuda is an NVIDIA GPU; anywhere else, cpu is the one)"
    # a list of GPUs is checked where these are known
    fits = re.compile(r"auto|cpu|cuda(:\d+|:all)?|.*,.*").fullmatch
    return option(text, default="auto", group=group, check=fits, expected=expected)


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Checked):
    """Says where a checkpoint comes from.

    For models on the Hub, the environment variables of huggingface_hub apply as well.
    """

    group: ClassVar = "Where it comes from"

    revision: str | None = option("Take this branch, tag or commit on the Hub.", unset="main")
    subfolder: str | None = option("Take the checkpoint in this subfolder.")
    variant: str | None = option("Take weight files with this word in their names, such as fp16.")
    gguf_file: str | None = option("Take this GGUF file of a folder or repository.", metavar="NAME")
    config_from: str | None = option(
        "Take config and tokenizer of a GGUF file from here.", metavar="MODEL"
    )
    stream: bool = option("Fetch weights as they are needed; keep no copy.", default=False)
    cache_dir: str | Path | None = option(
        "Keep downloads in this folder.", metavar="DIRECTORY", unset="HF_HUB_CACHE"
    )
    local_files_only: bool = option(
        "Take what was downloaded before, and ask no Hub.", default=False
    )
    token: str | None = option(
        "Use this token for the Hub.", is_secret=True, unset="that of hf auth login"
    )


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Checked):
    """Says how a command uses the machine. No option of this class changes a byte of the result."""

    group: ClassVar = "This machine"

    device: str = _device("Compute on auto, cpu, cuda or cuda:N.")
    workers: int = option("Use so many threads; 0 lets nf4conv choose.", default=0, most=1024)
    buffer_size: int = option(
        "Bytes of memory for reading, all threads together.",
        default=64 * 10**6,
        least=1,
        in_python=True,
    )
    progress: Callable[[int], None] | None = option(
        "Is called with what was done since the last call, from any thread: bytes that were read, "
        "or tokens that a model read in `evaluate`.",
        in_python=True,
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(MachineOptions):
    """Says how a command that writes a checkpoint uses the machine."""

    device: str = _device("Compute on auto, cpu, cuda, cuda:N, cuda:all or cuda:0,cuda:1.", "Usual")
    ray: bool = option(
        "Spread the work over the Ray cluster of RAY_ADDRESS, or a local one.", default=False
    )
    part: str | None = option(
        "Make part I of N in a folder that all processes see; the last one makes OUT whole.",
        metavar="I/N",
        check=_is_part,
        expected="I/N with I from 1 to N, such as 2/3",
    )
    overwrite: bool = option("Delete what is in OUT, and start anew.", default=False, group="Usual")
    verify: bool = option(
        "Read the result back and compare it with SRC.", default=False, group="Usual"
    )
    tolerance: float | None = option(
        "With --verify, let no weight have a larger relative error.",
        group="Checks",
        unset="0.112 for NF4 in blocks of 64",
        needs="verify",
        most=2,
    )

    @property
    def is_spread(self) -> bool:
        """Returns True if the run is to be spread over several workers."""
        return self.ray or self.device == "cuda:all" or "," in self.device


@dataclass(frozen=True, kw_only=True)
class PushOptions(SourceOptions):
    """Says where a checkpoint comes from, and where a result goes on the Hub."""

    group: ClassVar = "Publishing"

    push_to_hub: str | None = option(
        "Upload shards to this model repository as they are made.", metavar="REPO"
    )
    public: bool = option(
        "With --push-to-hub, let everybody see the repository.", default=False, needs="push_to_hub"
    )


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(PushOptions, RunOptions):
    """Says what `quantize` makes of a checkpoint, where that comes from, and how it is made.

    If the source is in 4 bits already, None in `quant_type`, `blocksize`, `double_quant`,
    `quant_storage` and `scales` takes what most of its weights have.
    """

    command: ClassVar[str] = "quantize"
    group: ClassVar = "What is made"

    quant_type: QuantType | None = option("Pack weights to this type.", unset="nf4, or SRC's own")
    blocksize: Blocksize | None = option(
        "Let 32, 64, … or 4096 weights share a scale.", unset="64, or SRC's own"
    )
    double_quant: bool | None = option(
        "Quantize scales too: 4.13 instead of 4.5 bits a weight.", unset="as in SRC, or yes"
    )
    compute_dtype: Dtype | None = option(
        "Let loaders compute in this dtype.", unset="--dtype, or bfloat16 for float32"
    )
    dtype: Dtype | None = option(
        "Store what is not packed in bf16, fp16 or fp32.", unset="that of config.json"
    )
    include: Names = option(
        "Pack only tensors whose names match this pattern, also in vision and audio parts.",
        group="Which weights",
        default=(),
        metavar="GLOB",
    )
    exclude: Names = option(
        "Keep tensors whose names match.", group="Which weights", default=(), metavar="GLOB"
    )
    moe: Literal["packed", "portable"] | None = option(
        "Pack experts, which transformers 5 loads with nf4conv, or keep them in 16 bits, which "
        "loads everywhere.",
        group="Which weights",
        unset="packed if they are most of the model and nothing is pushed",
    )
    max_shard_size: int = option(_SHARD_SIZE, default=10**9, unset="1GB", least=1, is_size=True)
    lora: Names = option(
        "First merge this PEFT adapter, a folder or model on the Hub, into the 16-bit SRC (or the "
        "4-bit one that it was trained on).",
        group="Usual",
        default=(),
        metavar="ADAPTER",
    )
    quant_storage: Literal["uint8", "bfloat16", "float16", "float32"] | None = option(
        "Store codes as uint8, or for FSDP in a float dtype.", unset="uint8, or SRC's own"
    )
    base_model: str | None = option(
        "Name this original in the model card.", group="Publishing", metavar="REPO", unset="by SRC"
    )
    scales: Scales | None = option(
        "Scale blocks as bitsandbytes does, or search for scales with smaller errors.",
        group="Usual",
        unset="absmax, or SRC's own",
    )
    calibrate: str | None = option(
        "Round so that what the model computes on this text changes little: a .txt, .jsonl or "
        ".npy file, or 'default' for what nf4conv ships.",
        group="Usual",
        metavar="TEXT",
    )
    calibrate_output: Literal["qkv", "all"] | None = option(
        "With --calibrate, weigh outputs by how much the predictions depend on them: those of "
        "queries, keys and values, or all. Takes a backward pass more.",
        needs="calibrate",
    )
    calibration_tokens: int | None = option(
        "Calibrate by this number of tokens.", unset="65536", least=512, needs="calibrate"
    )


@dataclass(frozen=True, kw_only=True)
class DequantizeOptions(SourceOptions, RunOptions):
    """Says what `dequantize` makes of a 4-bit checkpoint, where that comes from, and how."""

    command: ClassVar[str] = "dequantize"
    group: ClassVar = "What is made"

    dtype: Literal["bfloat16", "float16", "float32", "fp8"] | None = option(
        "Store weights in this dtype (short: bf16, fp16, fp32). fp8 is for MXFP4 experts of a "
        "model that is in FP8 otherwise, such as DeepSeek-V4: no value is rounded.",
        unset="as before they were quantized",
    )
    fp8_scales: Fp8Scales | None = option(
        "With --dtype fp8, store all scales in this dtype.", unset="as in SRC"
    )
    max_shard_size: int = option(_SHARD_SIZE, default=10**9, unset="1GB", least=1, is_size=True)
    lora: Names = option(
        "Merge this PEFT adapter into the decoded weights: a folder, or a model on the Hub, with "
        "or without @revision.",
        group="Usual",
        default=(),
        metavar="ADAPTER",
    )
    verify: bool = field(default=False, init=False)
    tolerance: float | None = field(default=None, init=False)


WritingOptions: TypeAlias = QuantizeOptions | DequantizeOptions
"""The options of a command that writes a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(SourceOptions, MachineOptions):
    """Says what `verify` requires of a checkpoint, and what it compares it with."""

    group: ClassVar = "Checks"

    source: str | Path | None = option(
        "Compare every value with this checkpoint, such as the one that PATH was made from.",
        metavar="SRC",
    )
    tolerance: float | None = option(
        "With --source, let no weight in 4 bits have a larger relative error, nor any tensor "
        "where nothing says how PATH was made. What dequantize decoded must be equal.",
        unset="0.112 for NF4 in blocks of 64",
        most=2,
    )
    exact: bool = option(
        "With --source, require the bytes that converting SRC gives, in config and files too; "
        "of calibrated weights, those that were recorded.",
        default=False,
    )
    lora: Names = option(
        "Merge this adapter into SRC before the comparison.", default=(), metavar="ADAPTER"
    )
    stream: bool = field(default=False, init=False)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SourceOptions, MachineOptions):
    """Says how `evaluate` compares models in 4 bits with their original."""

    group: ClassVar = "Checks"

    source: str | Path = field(
        metadata={
            "option": Option("Compare OUT with this model, from which it was made.", metavar="SRC")
        }
    )
    text: str | Path | None = option(
        "Let all models read this text, or these token ids (.npy).",
        metavar="FILE",
        unset="Python's own reference",
    )
    tokens: int | None = option(
        "Read this number of tokens.", unset="16384, or fewer, to write no more than 2 GiB", least=2
    )
    max_kl: float | None = option("Let the mean divergence be no larger, in nats.", metavar="NATS")
    workers: int = field(default=0, init=False)
    buffer_size: int = field(default=0, init=False)
    gguf_file: str | None = field(default=None, init=False)
    config_from: str | None = field(default=None, init=False)
    stream: bool = field(default=False, init=False)


@dataclass(frozen=True, kw_only=True)
class InspectOptions(SourceOptions):
    """Says where the checkpoint comes from that `inspect` describes."""

    stream: bool = field(default=False, init=False)
