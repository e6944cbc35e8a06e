"""What the user can choose, with its defaults: the one home of both. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

DTYPES: Final = ("bfloat16", "float16", "float32")
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "quant_type": ("nf4", "fp4"),
    "scales": ("absmax", "search"),
    "quant_storage": ("uint8", *DTYPES),
    "dtype": DTYPES,
    "compute_dtype": DTYPES,
    "moe": ("portable", "per-expert"),
    "plan_with": ("rules", "transformers"),
    "non_finite": ("refuse", "keep"),
}
"""What an option of QuantizeOptions may be, if it is not None."""


@dataclass(frozen=True)
class RunOptions:
    """How a run uses the machine. None of it changes a byte of the result."""

    # "auto", "cpu", "cuda" or "cuda:N"; auto takes the first GPU if there is one. `quantize` and
    # `dequantize` spread over "cuda:all", or a list such as "cuda:0,cuda:1": `workers` and
    # `buffer_size` are then of each.
    device: str = "auto"
    workers: int = (
        0  # threads that each read, compute and write; 0 chooses: one a core, at most 8 for a GPU
    )
    buffer_size: int = 64 * 10**6  # bytes of host memory for reading, all workers together
    overwrite: bool = False  # delete what is in the output folder
    checksum: bool = False  # write SHA256SUMS, a manifest of the output that `sha256sum -c` checks
    verify: bool = (
        False  # read back what has been written and compare it with the source; `quantize` only
    )
    tolerance: float | None = None  # as of VerifyOptions, with `verify`
    # "I/N" makes only the I-th of N parts of the output, I counting from 1, for `finish` to put
    # together; "auto" takes I and N from the environment that SLURM, Kubernetes or torchrun sets.
    # None makes all.
    part: str | None = None
    # spread over the Ray cluster of RAY_ADDRESS, or a local one; `workers` is then of each task
    ray: bool = False


@dataclass(frozen=True)
class SourceOptions:
    """Where a checkpoint comes from. On the Hub, what huggingface_hub reads from the environment
    applies as well.
    """

    revision: str | None = None  # branch, tag or commit; None for the main branch
    token: str | None = field(
        default=None, repr=False
    )  # to read with; None for the one that is logged in
    cache_dir: Path | None = None  # where downloads are kept; None for huggingface_hub's
    local_files_only: bool = False  # take what is in the cache, and ask nobody
    subfolder: str | None = None  # of the repository or folder that holds the checkpoint
    variant: str | None = None  # such as "fp16", in the names of the weight files
    stream: bool = False  # fetch weights as they are needed and keep no copy


@dataclass(frozen=True)
class PushOptions:
    """Where a result goes on the Hub."""

    push_to_hub: str | None = (
        None  # "org/name" of a model repository, made if it does not exist; None to push nothing
    )
    public: bool = False  # whether everybody may see it
    token: str | bool | None = field(
        default=None, repr=False
    )  # to write with; None for the one that is logged in


@dataclass(frozen=True)
class QuantizeOptions:
    """What `quantize` makes of a checkpoint."""

    quant_type: str | None = (
        None  # "nf4" or "fp4"; None takes what most of a 4-bit source has, or else "nf4"
    )
    blocksize: int | None = (
        None  # elements that share one absmax; None as for quant_type, or else 64
    )
    double_quant: bool | None = (
        None  # whether absmax is quantized too; None as for quant_type, or else True
    )
    # what loaders compute in: "bfloat16", "float16" or "float32"; None takes what the config of a
    # 4-bit source says, or else `dtype` unless that is float32, which is slow
    compute_dtype: str | None = None
    # what unquantized tensors are stored in and weights are cast to before they are packed; None
    # takes the config's, or else the dtype that most of the checkpoint is stored in
    dtype: str | None = None
    # glob patterns; only tensors that match one are packed, those included of which the rules are
    # unsure. Empty: all that can be.
    include: tuple[str, ...] = ()
    exclude: tuple[
        str, ...
    ] = ()  # glob patterns of tensors to keep, beside those that are kept anyway
    skip_modules: tuple[
        str, ...
    ] = ()  # modules to keep, as `llm_int8_skip_modules` in transformers 4 or 5
    quantize_towers: bool = False  # whether to pack vision and audio towers too
    # how experts are stored: "portable" keeps them in 16 bits, which loads everywhere; "per-expert"
    # packs those that are stored one by one, which transformers 4 and vLLM load but transformers 5
    # does not. None is "portable", but leaves packed what a 4-bit source has packed.
    moe: str | None = None
    plan_with: str = (
        "rules"  # who says which modules are linear: our "rules", or the installed "transformers"
    )
    # bytes of an output file. Several files are written at a time, which is faster than one.
    max_shard_size: int = 10**9
    # what to do with a weight that holds NaN or infinity: "refuse" or "keep" it unquantized
    non_finite: str = "refuse"
    # adapters of PEFT to merge first: folders, or "org/name" or "org/name@revision" on the Hub
    lora: tuple[str, ...] = ()
    # whether the output is one file for image tools, under the names that the authors gave the
    # weights
    single_file: bool = False
    # what packed codes are stored as: "uint8", or for FSDP "bfloat16", "float16" or "float32"; None
    # as for quant_type, or else "uint8"
    quant_storage: str | None = None
    # "org/name" of the original, for the model card; None takes where the source is from, or what
    # its config.json says
    base_model: str | None = None
    # "absmax", with the bytes of bitsandbytes; or "search", which makes the squared error of every
    # block smaller in as many bytes, by a scale of its own, of either sign. None as for quant_type,
    # or else "absmax".
    scales: str | None = None


@dataclass(frozen=True)
class DequantizeOptions:
    """What `dequantize` makes of a 4-bit checkpoint."""

    # what all float tensors are stored in, except those that are float32 by design; None decodes
    # each weight to the dtype that it had before it was quantized, and leaves the rest as it is
    dtype: str | None = None
    include: tuple[
        str, ...
    ] = ()  # glob patterns; only weights that match one are decoded. Empty: all.
    exclude: tuple[str, ...] = ()  # glob patterns of weights to leave in 4 bits
    max_shard_size: int = 10**9  # bytes of an output file
    lora: tuple[
        str, ...
    ] = ()  # as of QuantizeOptions; with them the checkpoint need not be in 4 bits


@dataclass(frozen=True)
class CompareOptions:
    """What `compare` looks at, and what it lets pass."""

    # the largest relative Frobenius error of a tensor, 0 asking for equal values however they are
    # stored; None asks for equal bytes
    tolerance: float | None = None
    include: tuple[
        str, ...
    ] = ()  # glob patterns; only tensors that match one are compared. Empty: all.
    exclude: tuple[str, ...] = ()  # glob patterns of tensors to leave out


@dataclass(frozen=True)
class VerifyOptions:
    """What `verify` requires of a checkpoint that is compared with its source."""

    # the largest relative Frobenius error of a packed weight; None for that of its data type and
    # blocksize, see tolerance.py
    tolerance: float | None = None
    exact: bool = False  # require the bytes that quantizing the source gives
    lora: tuple[str, ...] = ()  # adapters that were merged into the source; as of QuantizeOptions


@dataclass(frozen=True)
class EvaluateOptions:
    """How `evaluate` compares two models."""

    # a file of UTF-8 text, or of token ids (.npy); None takes the reference of the Python language
    text: Path | None = None
    tokens: int | None = (
        None  # how many to read; None: 16,384, or as many as 2 GiB of log-probabilities are of
    )
    max_kl: float | None = None  # fail if the mean divergence is larger, in nats
    # whether to write the figures into OUT/README.md, and to renew its line in SHA256SUMS
    card: bool = False
