"""Defines the options of every command, with their defaults. Imports no torch.

The command line offers the same options under the same names; docs/options.md lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nf4conv.choices import (
    BLOCKSIZES,
    DTYPES,
    LORA_EXPERTS,
    MOE,
    MOE_ALIASES,
    OUTPUTS,
    QUANT_STORAGES,
    QUANT_TYPES,
    SCALES,
    Blocksize,
    CalibrateOutput,
    Dtype,
    LoraExperts,
    Moe,
    QuantStorage,
    QuantType,
    Scales,
    require_at_least,
    require_device,
    require_error,
    require_one_of,
    require_part,
    take_names,
)

# The values that a field of QuantizeOptions may have, besides None.
CHOICES: Final[Mapping[str, tuple[object, ...]]] = {
    "quant_type": QUANT_TYPES,
    "scales": SCALES,
    "quant_storage": QUANT_STORAGES,
    "dtype": DTYPES,
    "compute_dtype": DTYPES,
    "moe": MOE,
    "calibrate_output": OUTPUTS,
    "lora_experts": LORA_EXPERTS,
}

_RELATIVE_ERROR: Final = "a relative error such as 0.1"


@dataclass(frozen=True)
class RunOptions:
    """Says how a run uses the machine. None of these options changes a byte of the result.

    Attributes:
        device: the device that computes: "auto" (default), "cpu", "cuda" or "cuda:N". "auto" takes
            the first GPU if there is one, and otherwise the CPU. `quantize` and `dequantize` also
            use several GPUs: "cuda:all", or a list such as "cuda:0,cuda:1". `workers` and
            `buffer_size` then count for each GPU.
        workers: the number of threads; each of them reads, computes and writes. 0 (default) takes
            one per CPU core, and at most 8 for a GPU.
        buffer_size: bytes of host memory for reading, for all workers together. Default: 64 MB.
        overwrite: True deletes what is in the output folder. Default: False.
        checksum: True writes SHA256SUMS, a manifest of the output that `sha256sum -c` checks.
            Default: False.
        verify: True reads back what was written and compares it with the source. Default: False.
            Only `quantize` has it.
        tolerance: with `verify`, the largest relative Frobenius error ‖W - Ŵ‖ / ‖W‖ that a packed
            weight may have. None (default) takes the usual limit of the weight's format, 0.112 for
            NF4 in blocks of 64 (docs/verify.md).
        part: "I/N" makes only part I of N parts of the output, with I from 1 to N;
            `finish_checkpoint` puts the parts together. "auto" takes I and N from the environment
            variables that SLURM, Kubernetes or torchrun set. None (default) makes the whole output.
        ray: True spreads the work over the Ray cluster that RAY_ADDRESS names, or over a local one.
            `workers` then counts for each Ray task. Default: False.
    """

    device: str = "auto"
    workers: int = 0
    buffer_size: int = 64 * 10**6
    overwrite: bool = False
    checksum: bool = False
    verify: bool = False
    tolerance: float | None = None
    part: str | None = None
    ray: bool = False

    def __post_init__(self) -> None:
        require_device(self.device)
        require_at_least(self, 0, "workers")
        require_at_least(self, 1, "buffer_size")
        require_error(self, "tolerance", _RELATIVE_ERROR)
        require_part(self.part)

    @property
    def is_spread(self) -> bool:
        """Returns True if the run is to be spread over several workers."""
        return self.ray or self.device == "cuda:all" or "," in self.device


@dataclass(frozen=True)
class SourceOptions:
    """Says where a checkpoint comes from.

    For models on the Hub, the environment variables of huggingface_hub apply as well.

    Attributes:
        revision: a branch, tag or commit on the Hub. None (default) takes the main branch.
        token: the access token for reading from the Hub. None (default) takes the token of
            `hf auth login`.
        cache_dir: the folder that keeps downloads. None (default) takes huggingface_hub's cache.
        local_files_only: True uses only files that are in the cache, and does not contact the Hub.
            Default: False.
        subfolder: the folder that holds the checkpoint, inside the repository or the local folder.
            None (default) takes the top folder.
        variant: a word in the names of the weight files, such as "fp16". None (default) takes the
            weight files without such a word.
        stream: True fetches weights from the Hub when they are needed, and keeps no copy. Default:
            False, which downloads whole files.
        gguf_file: the name of a GGUF file in the folder or repository, which is the source then.
            None (default) takes safetensors, or pickles.
        mmproj: for a GGUF file, the file of the tower that sees or hears: a path, or a name in the
            folder or repository. It needs `config_from`. None (default) takes the text model alone.
        config_from: for a GGUF file, the folder or model on the Hub from which config.json and the
            tokenizer are taken. None (default) makes them of the file's metadata.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    cache_dir: Path | None = None
    local_files_only: bool = False
    subfolder: str | None = None
    variant: str | None = None
    stream: bool = False
    gguf_file: str | None = None
    mmproj: str | None = None
    config_from: str | None = None


@dataclass(frozen=True)
class PushOptions:
    """Says where a result goes on the Hub.

    Attributes:
        push_to_hub: the model repository "org/name"; the push creates it if it does not exist. None
            (default) pushes nothing.
        public: True lets everybody see the repository. False (default) creates a private one, and
            refuses a repository that is public.
        create_pr: True opens a pull request with the result on a repository that is there, and
            changes nothing else in it. Default: False, which commits to the main branch.
        token: the access token for writing to the Hub. None (default) takes the token of
            `hf auth login`.
    """

    push_to_hub: str | None = None
    public: bool = False
    create_pr: bool = False
    token: str | bool | None = field(default=None, repr=False)


@dataclass(frozen=True)
class QuantizeOptions:
    """Says what `quantize` makes of a checkpoint.

    If the source is in 4 bits already, None in `quant_type`, `blocksize`, `double_quant`,
    `quant_storage` and `scales` takes what most of its weights have.

    Attributes:
        quant_type: the 4-bit data type, "nf4" or "fp4". None (default) is "nf4" for a source that
            is not in 4 bits.
        blocksize: the number of weights that share one absmax: 32, 64, 128, … 4096. None (default)
            is 64 for a source that is not in 4 bits.
        double_quant: True quantizes absmax too. None (default) is True for a source that is not in
            4 bits.
        compute_dtype: the dtype that loaders compute in: "bfloat16", "float16" or "float32". None
            (default) takes what the config of a 4-bit source says; otherwise `dtype`, or bfloat16
            if `dtype` is float32, which is slow.
        dtype: the dtype that stores unpacked tensors, and to which weights are cast before they are
            packed: "bfloat16", "float16" or "float32". None (default) takes the dtype in
            config.json, or else the dtype that most of the checkpoint is stored in.
        include: glob patterns. Only tensors that match one are packed, also those of vision and
            audio towers, and tensors that the rules are unsure about. Empty (default) packs
            everything that the rules allow.
        exclude: glob patterns of tensors to keep unpacked, besides those that are kept anyway.
            Default: empty.
        moe: how to store experts. "packed" packs them one by one, and takes stacks of them apart;
            transformers 5 loads that with nf4conv installed. "stacked" packs the stacks of each
            layer, and puts single experts together to such stacks. "portable" keeps experts in 16
            bits, which loads everywhere. "per-expert" is another name for "packed". None (default)
            is "packed" if experts take more than half of the bytes, and else "portable"; a 4-bit
            source keeps packed what it has packed.
        max_shard_size: the largest size of an output file in bytes. Default: 1 GB. nf4conv writes
            several files at a time, which is faster than one.
        lora: PEFT adapters to merge first: folders, or "org/name" or "org/name@revision" on the
            Hub. Default: empty.
        lora_experts: the order in which an adapter of experts stores the columns of lora_B:
            "rank-major", as PEFT does, or "expert-major", as Unsloth did before 2026-09-17. None
            (default) takes what the adapter says, else PEFT's, but refuses an adapter of Unsloth
            that says nothing.
        single_file: True writes one file for image tools, with the tensor names of the original
            authors. Default: False.
        quant_storage: the dtype that stores packed codes: "uint8", or for FSDP "bfloat16",
            "float16" or "float32". None (default) is "uint8" for a source that is not in 4 bits.
        base_model: the original "org/name" that the model card names. None (default) takes the
            repository that the source is from, or the one that its config.json names.
        scales: how to scale each block. "absmax" writes the bytes of bitsandbytes. "search" chooses
            a scale, of either sign, that makes the squared error of the block smaller in as many
            bytes. It needs the 16-bit model: weights that stay in 4 bits are not searched. None
            (default) is "absmax" for a source that is not in 4 bits.
        calibrate: texts that the model reads while it is quantized: files of text (.txt), of JSON
            lines with "text" or "messages" (.jsonl) or of token ids (.npy), or "default" for what
            nf4conv ships. "FILE=0.5" says what share of the tokens a file has beside others. Codes
            and scales are then chosen so that the outputs of each layer change little; scales that
            no text reaches are searched. Needs `pip install 'nf4conv[calibrate]'`. Default: empty,
            which rounds every weight for itself.
        calibrate_output: with `calibrate`, lets it also count how much the predictions depend on
            the outputs of weights, by one backward pass: of those that come first in each block
            ("qkv"), or of "all" but experts. None (default) counts all outputs alike.
        calibration_tokens: how many tokens calibrate. None (default) is 65,536.
        calibration_seed: decides which windows of the texts are read. None (default) is 0.
        calibration_memory: the most bytes of hidden states to keep in memory; more go to a file in
            the output folder. None (default) is 4 GB. It changes no byte of the result.
    """

    quant_type: QuantType | None = None
    blocksize: Blocksize | None = None
    double_quant: bool | None = None
    compute_dtype: Dtype | None = None
    dtype: Dtype | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    moe: Moe | None = None
    max_shard_size: int = 10**9
    lora: tuple[str, ...] = ()
    lora_experts: LoraExperts | None = None
    single_file: bool = False
    quant_storage: QuantStorage | None = None
    base_model: str | None = None
    scales: Scales | None = None
    calibrate: tuple[str, ...] = ()
    calibrate_output: CalibrateOutput | None = None
    calibration_tokens: int | None = None
    calibration_seed: int | None = None
    calibration_memory: int | None = None

    def __post_init__(self) -> None:
        require_one_of(self, CHOICES)
        require_one_of(self, {"blocksize": BLOCKSIZES})
        take_names(self, "include", "exclude", "lora", "calibrate")
        require_at_least(self, 1, "max_shard_size", "calibration_tokens", "calibration_memory")
        if self.moe is not None and self.moe in MOE_ALIASES:
            object.__setattr__(self, "moe", MOE_ALIASES[self.moe])


@dataclass(frozen=True)
class DequantizeOptions:
    """Says what `dequantize` makes of a 4-bit checkpoint.

    Attributes:
        dtype: the dtype that stores all float tensors, except those that are float32 by design:
            "bfloat16", "float16" or "float32". None (default) decodes each weight to the dtype that
            it had before it was quantized, and leaves all other tensors as they are.
        include: glob patterns. Only weights that match one are decoded. Empty (default) decodes all
            of them.
        exclude: glob patterns of weights to leave in 4 bits. Default: empty.
        max_shard_size: the largest size of an output file in bytes. Default: 1 GB.
        lora: PEFT adapters to merge first: folders, or "org/name" or "org/name@revision" on the
            Hub. With adapters, the checkpoint need not be in 4 bits. Default: empty.
        lora_experts: the order in which an adapter of experts stores the columns of lora_B:
            "rank-major", as PEFT does, or "expert-major", as Unsloth did before 2026-09-17. None
            (default) takes what the adapter says, else PEFT's, but refuses an adapter of Unsloth
            that says nothing.
    """

    dtype: Dtype | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_shard_size: int = 10**9
    lora: tuple[str, ...] = ()
    lora_experts: LoraExperts | None = None

    def __post_init__(self) -> None:
        require_one_of(self, {"dtype": DTYPES, "lora_experts": LORA_EXPERTS})
        take_names(self, "include", "exclude", "lora")
        require_at_least(self, 1, "max_shard_size")


@dataclass(frozen=True)
class CompareOptions:
    """Says which tensors `compare` looks at, and which differences it accepts.

    Attributes:
        tolerance: the largest relative Frobenius error ‖A - B‖ / ‖A‖ that a tensor may have. 0
            requires equal values, in whatever format they are stored. None (default) requires equal
            bytes.
        include: glob patterns. Only tensors that match one are compared. Empty (default) compares
            all of them.
        exclude: glob patterns of tensors to leave out. Default: empty.
    """

    tolerance: float | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_error(self, "tolerance", _RELATIVE_ERROR)
        take_names(self, "include", "exclude")


@dataclass(frozen=True)
class VerifyOptions:
    """Says what `verify` requires of a checkpoint that it compares with its source.

    Attributes:
        tolerance: the largest relative Frobenius error ‖W - Ŵ‖ / ‖W‖ that a packed weight may have.
            None (default) takes the usual limit of the weight's format, 0.112 for NF4 in blocks of
            64 (docs/verify.md). What `dequantize` decoded must be equal, whatever the tolerance.
        exact: True requires the bytes that quantizing the source gives. Of a decoded checkpoint,
            whose values must always be equal, it requires every key of config.json and the files
            beside the weights. Default: False.
        lora: PEFT adapters that were merged into the source before it was quantized: folders, or
            "org/name" or "org/name@revision" on the Hub. Default: empty.
        lora_experts: the order in which an adapter of experts stores the columns of lora_B:
            "rank-major", as PEFT does, or "expert-major", as Unsloth did before 2026-09-17. None
            (default) takes what the adapter says, else PEFT's, but refuses an adapter of Unsloth
            that says nothing.
    """

    tolerance: float | None = None
    exact: bool = False
    lora: tuple[str, ...] = ()
    lora_experts: LoraExperts | None = None

    def __post_init__(self) -> None:
        require_error(self, "tolerance", _RELATIVE_ERROR)
        require_one_of(self, {"lora_experts": LORA_EXPERTS})
        take_names(self, "lora")


@dataclass(frozen=True)
class EvaluateOptions:
    """Says how `evaluate` compares two models.

    Attributes:
        text: a file of UTF-8 text, or of token ids (.npy). None (default) takes the reference of
            the Python language.
        tokens: the number of tokens to read, at least 2. None (default) reads 16,384, or as many
            as give 2 GiB of log-probabilities if that is fewer.
        max_kl: the largest mean divergence, in nats, with which the evaluation passes. None
            (default) lets every divergence pass.
        card: True writes the figures into OUT/README.md and updates its line in SHA256SUMS. With
            several models, also OUT/evaluation.svg, the plot. Default: False.
        plot: a file that gets a drawing, in SVG: divergence against bits per weight. None
            (default) draws nothing.
    """

    text: Path | None = None
    tokens: int | None = None
    max_kl: float | None = None
    card: bool = False
    plot: Path | None = None

    def __post_init__(self) -> None:
        require_at_least(self, 2, "tokens")
        require_error(self, "max_kl", "a divergence in nats, such as 0.05")
