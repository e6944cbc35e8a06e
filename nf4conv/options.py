"""Declares the options of every command, each of them once. Imports no torch.

From a field come click's option (cli/parameters.py), the check of its value (declaring.py), the
keyword of the function in Python, and its line in docs/options.md.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, get_args

from nf4conv.declaring import Checked, Group, Option

QuantType: TypeAlias = Literal["nf4", "fp4"]
Blocksize: TypeAlias = Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
Scales: TypeAlias = Literal["absmax", "search"]
Dtype: TypeAlias = Literal["bfloat16", "float16", "float32"]
QuantStorage: TypeAlias = Literal["uint8", "bfloat16", "float16", "float32"]
Moe: TypeAlias = Literal["packed", "portable"]
CalibrateOutput: TypeAlias = Literal["qkv", "all"]
Names: TypeAlias = tuple[str, ...] | list[str]
"""Several names; a class of options makes a tuple of them."""

DTYPES: Final = get_args(Dtype)

_RELATIVE_ERROR: Final = "a relative error such as 0.1, and at most 2"
_ADAPTER: Final = "a folder, or a model on the Hub, with or without @revision"
_SHARD_SIZE: Final = (
    "Make no file larger than this. Several files are written at a time, which is faster than one."
)
_ONE_DEVICE: Final = "Compute on this device: auto, cpu, cuda or cuda:N."


def _is_device(name: str) -> bool:
    """Returns True for the name of a device. A list of GPUs is checked where these are known."""
    return "," in name or re.fullmatch(r"auto|cpu|cuda(:\d+|:all)?", name) is not None


def _is_part(part: str) -> bool:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    return match is not None and 1 <= int(match[1]) <= int(match[2])


def _device(help: str) -> Option:
    return Option(
        Group.MACHINE,
        help,
        check=_is_device,
        expected="auto, cpu, cuda or cuda:N (cuda is an NVIDIA GPU; anywhere else, cpu is the one)",
    )


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Checked):
    """Says where a checkpoint comes from.

    For models on the Hub, the environment variables of huggingface_hub apply as well.
    """

    revision: Annotated[
        str | None,
        Option(
            Group.SOURCE, "Take this branch, tag or commit of a model on the Hub.", unset="main"
        ),
    ] = None
    subfolder: Annotated[
        str | None,
        Option(Group.SOURCE, "Take the checkpoint in this subfolder, such as transformer."),
    ] = None
    variant: Annotated[
        str | None,
        Option(Group.SOURCE, "Take the weight files with this word in their names, such as fp16."),
    ] = None
    gguf_file: Annotated[
        str | None,
        Option(
            Group.SOURCE,
            "Take the GGUF file with this name, of several in a folder.",
            metavar="NAME",
        ),
    ] = None
    config_from: Annotated[
        str | None,
        Option(
            Group.SOURCE,
            "For a GGUF file: take config.json and the tokenizer from this model.",
            metavar="MODEL",
        ),
    ] = None
    stream: Annotated[
        bool,
        Option(Group.SOURCE, "Fetch weights from the Hub when they are needed, and keep no copy."),
    ] = False
    cache_dir: Annotated[
        str | Path | None,
        Option(
            Group.SOURCE,
            "Keep downloads in this folder.",
            metavar="DIRECTORY",
            unset="HF_HUB_CACHE",
        ),
    ] = None
    local_files_only: Annotated[
        bool, Option(Group.SOURCE, "Take what was downloaded before, and do not ask the Hub.")
    ] = False
    token: Annotated[
        str | None,
        Option(Group.SOURCE, "Use this access token for the Hub.", unset="that of hf auth login"),
    ] = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Checked):
    """Says how a command uses the machine. No option of this class changes a byte of the result."""

    device: Annotated[str, _device(_ONE_DEVICE)] = "auto"
    workers: Annotated[
        int,
        Option(
            Group.MACHINE,
            "Read, compute and write with this many threads; 0 lets nf4conv choose.",
            metavar="N",
            most=1024,
        ),
    ] = 0
    buffer_size: Annotated[
        int,
        Option(
            Group.MACHINE,
            "Bytes of memory for reading, all threads together.",
            least=1,
            in_python=True,
        ),
    ] = 64 * 10**6
    progress: Annotated[
        Callable[[int], None] | None,
        Option(
            Group.MACHINE,
            "Is called with the number of bytes that have been read since the last call, from any "
            "thread.",
            in_python=True,
        ),
    ] = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class RunOptions(MachineOptions):
    """Says how a command that writes a checkpoint uses the machine."""

    device: Annotated[
        str,
        _device(
            "Compute on this device: auto, cpu, cuda or cuda:N; or on several GPUs: cuda:all or "
            "cuda:0,cuda:1."
        ),
    ] = "auto"
    ray: Annotated[
        bool,
        Option(
            Group.MACHINE,
            "Spread the work over a Ray cluster: that of RAY_ADDRESS, or a local one.",
        ),
    ] = False
    part: Annotated[
        str | None,
        Option(
            Group.MACHINE,
            "Make only part I of N, in a folder that all processes see. The last part makes OUT "
            "whole, and so does the same command without --part.",
            metavar="I/N",
            check=_is_part,
            expected="I/N with I from 1 to N, such as 2/3",
        ),
    ] = None
    overwrite: Annotated[bool, Option(Group.MACHINE, "Delete what is in OUT, and start anew.")] = (
        False
    )
    verify: Annotated[
        bool, Option(Group.CHECKS, "Read back what was written, and compare it with SRC.")
    ] = False
    tolerance: Annotated[
        float | None,
        Option(
            Group.CHECKS,
            "With --verify, let no weight have a larger relative error.",
            unset="0.112 for NF4 in blocks of 64",
            needs="verify",
            most=2,
            expected=_RELATIVE_ERROR,
        ),
    ] = None

    @property
    def is_spread(self) -> bool:
        """Returns True if the run is to be spread over several workers."""
        return self.ray or self.device == "cuda:all" or "," in self.device


@dataclass(frozen=True, kw_only=True)
class PushOptions(Checked):
    """Says where a result goes on the Hub."""

    push_to_hub: Annotated[
        str | None,
        Option(
            Group.PUBLISHING,
            "Upload the result to this model repository, shard by shard.",
            metavar="REPO",
        ),
    ] = None
    public: Annotated[
        bool,
        Option(
            Group.PUBLISHING,
            "With --push-to-hub, let everybody see the repository.",
            needs="push_to_hub",
        ),
    ] = False
    token: Annotated[str | None, Option(Group.SOURCE, "Use this access token for the Hub.")] = (
        field(default=None, repr=False)
    )


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(SourceOptions, RunOptions, PushOptions):
    """Says what `quantize` makes of a checkpoint, where that comes from, and how it is made.

    If the source is in 4 bits already, None in `quant_type`, `blocksize`, `double_quant`,
    `quant_storage` and `scales` takes what most of its weights have.
    """

    quant_type: Annotated[
        QuantType | None,
        Option(Group.RESULT, "Pack weights to this data type.", unset="nf4, or SRC's own"),
    ] = None
    blocksize: Annotated[
        Blocksize | None,
        Option(
            Group.RESULT,
            "Let this many weights share one scale: 32, 64, … 4096.",
            metavar="N",
            unset="64, or SRC's own",
        ),
    ] = None
    double_quant: Annotated[
        bool | None,
        Option(
            Group.RESULT,
            "Quantize the scales too: 4.13 instead of 4.5 bits per weight.",
            unset="do, or as in SRC",
        ),
    ] = None
    compute_dtype: Annotated[
        Dtype | None,
        Option(
            Group.RESULT,
            "Let loaders compute in this dtype.",
            unset="that of --dtype, but bfloat16 for float32",
        ),
    ] = None
    dtype: Annotated[
        Dtype | None,
        Option(
            Group.RESULT,
            "Store what is not packed in this dtype; bf16, fp16 and fp32 are short names.",
            unset="that of config.json",
        ),
    ] = None
    include: Annotated[
        Names,
        Option(
            Group.WEIGHTS,
            "Pack only tensors whose names match, such as '*.layers.0.*', vision and audio towers "
            "too.",
            metavar="GLOB",
        ),
    ] = ()
    exclude: Annotated[
        Names, Option(Group.WEIGHTS, "Keep tensors whose names match.", metavar="GLOB")
    ] = ()
    moe: Annotated[
        Moe | None,
        Option(
            Group.WEIGHTS,
            "Pack experts one by one, which transformers 5 loads with nf4conv installed; or keep "
            "them "
            "in 16 bits, which loads everywhere.",
            unset="packed if experts are most of the model, portable with --push-to-hub",
        ),
    ] = None
    max_shard_size: Annotated[int, Option(Group.RESULT, _SHARD_SIZE, least=1, is_size=True)] = 10**9
    lora: Annotated[
        Names,
        Option(
            Group.RESULT,
            f"First merge this PEFT adapter: {_ADAPTER}. SRC should be the 16-bit model, or a "
            "4-bit "
            "one if the adapter was trained on that.",
            metavar="ADAPTER",
        ),
    ] = ()
    quant_storage: Annotated[
        QuantStorage | None,
        Option(
            Group.RESULT,
            "Store packed bytes in this dtype; FSDP needs a float dtype.",
            unset="uint8, or SRC's own",
        ),
    ] = None
    base_model: Annotated[
        str | None,
        Option(
            Group.PUBLISHING,
            "Name this original in the model card.",
            metavar="REPO",
            unset="where SRC is from, or what its config.json says",
        ),
    ] = None
    scales: Annotated[
        Scales | None,
        Option(
            Group.RESULT,
            "Scale each block by its largest value, as bitsandbytes does, or search for a scale "
            "with "
            "a smaller error.",
            unset="absmax, or SRC's own",
        ),
    ] = None
    calibrate: Annotated[
        str | None,
        Option(
            Group.RESULT,
            "Let the model read this text (.txt, .jsonl, .npy) while it is quantized, and lose "
            "less. "
            "'default' takes what nf4conv ships.",
            metavar="TEXT",
        ),
    ] = None
    calibrate_output: Annotated[
        CalibrateOutput | None,
        Option(
            Group.RESULT,
            "With --calibrate, count how much the predictions depend on the outputs of queries, "
            "keys "
            "and values, or of all weights: one backward pass more.",
            needs="calibrate",
        ),
    ] = None
    calibration_tokens: Annotated[
        int | None,
        Option(
            Group.RESULT,
            "Calibrate by this number of tokens.",
            metavar="N",
            unset="65536",
            least=1,
            needs="calibrate",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DequantizeOptions(SourceOptions, RunOptions):
    """Says what `dequantize` makes of a 4-bit checkpoint, where that comes from, and how."""

    dtype: Annotated[
        Dtype | None,
        Option(
            Group.RESULT,
            "Store weights in this dtype; bf16, fp16 and fp32 are short names.",
            unset="as before they were quantized",
        ),
    ] = None
    include: Annotated[
        Names, Option(Group.WEIGHTS, "Decode only weights whose names match.", metavar="GLOB")
    ] = ()
    exclude: Annotated[
        Names, Option(Group.WEIGHTS, "Leave weights whose names match in 4 bits.", metavar="GLOB")
    ] = ()
    max_shard_size: Annotated[int, Option(Group.RESULT, _SHARD_SIZE, least=1, is_size=True)] = 10**9
    lora: Annotated[
        Names,
        Option(
            Group.RESULT,
            f"Merge this PEFT adapter into the decoded weights: {_ADAPTER}.",
            metavar="ADAPTER",
        ),
    ] = ()
    verify: bool = field(default=False, init=False)
    tolerance: float | None = field(default=None, init=False)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(SourceOptions, MachineOptions):
    """Says what `verify` requires of a checkpoint, and what it compares it with."""

    source: Annotated[
        str | Path | None,
        Option(
            Group.CHECKS,
            "Compare every value with this checkpoint, such as the one that PATH was made from.",
            metavar="SRC",
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        Option(
            Group.CHECKS,
            "With --source, let no weight in 4 bits have a larger relative error, nor any tensor "
            "where nothing says how PATH was made. What dequantize decoded must be equal.",
            unset="0.112 for NF4 in blocks of 64",
            most=2,
            expected=_RELATIVE_ERROR,
        ),
    ] = None
    exact: Annotated[
        bool,
        Option(
            Group.CHECKS,
            "With --source, require the bytes that converting SRC gives, in config and files too; "
            "of calibrated weights, those that were recorded.",
        ),
    ] = False
    lora: Annotated[
        Names,
        Option(
            Group.CHECKS, "Merge this adapter into SRC before the comparison.", metavar="ADAPTER"
        ),
    ] = ()
    stream: bool = field(default=False, init=False)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(SourceOptions):
    """Says how `evaluate` compares models in 4 bits with their original."""

    source: Annotated[
        str | Path,
        Option(Group.CHECKS, "Compare OUT with this model, from which it was made.", metavar="SRC"),
    ]
    text: Annotated[
        str | Path | None,
        Option(
            Group.CHECKS,
            "Let all models read this text, or these token ids (.npy).",
            metavar="FILE",
            unset="Python's own reference",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Option(
            Group.CHECKS,
            "Read this number of tokens.",
            metavar="N",
            unset="16384, or fewer, to write no more than 2 GiB",
            least=2,
        ),
    ] = None
    max_kl: Annotated[
        float | None,
        Option(
            Group.CHECKS,
            "Let the mean divergence be no larger, in nats.",
            metavar="NATS",
            expected="a divergence in nats, such as 0.05",
        ),
    ] = None
    device: Annotated[str, _device(_ONE_DEVICE)] = "auto"
    progress: Annotated[
        Callable[[float], None] | None,
        Option(
            Group.MACHINE,
            "Is called with the share of the work that was done since the last call; all shares "
            "add "
            "up to 1.",
            in_python=True,
        ),
    ] = field(default=None, repr=False, compare=False)
    gguf_file: str | None = field(default=None, init=False)
    config_from: str | None = field(default=None, init=False)
    stream: bool = field(default=False, init=False)


@dataclass(frozen=True, kw_only=True)
class InspectOptions(SourceOptions):
    """Says where the checkpoint comes from that `inspect` describes."""

    stream: bool = field(default=False, init=False)
