"""Declares the options that several commands share.

Every name that ends with `_option` or `_options` is a decorator for a command, or a function that
returns one: the function takes the help text, because the commands need different words.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import click

from nf4conv.choices import LORA_EXPERTS
from nf4conv.cli.help import Group, option
from nf4conv.cli.log import show_log
from nf4conv.cli.parameters import Dtype, Place, Size, WholeNumber

Declaration: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]

FILE: Final = click.Path(dir_okay=False, path_type=Path)


def several(*declarations: Declaration) -> Declaration:
    """Declares several options in the order given."""

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        for declaration in reversed(declarations):
            command = declaration(command)
        return command

    return declare


# --- what is made -----------------------------------------------------------------------------

max_shard_size_option = option(
    "--max-shard-size",
    group=Group.RESULT,
    type=Size(),
    default="1GB",
    show_default=True,
    help="Make no file larger than this. Several files are written at a time, which is faster "
    "than one.",
)


def lora_option(help: str, group: Group = Group.RESULT) -> Declaration:
    return option("--lora", group=group, multiple=True, metavar="ADAPTER", help=help)


def lora_experts_option(group: Group = Group.RESULT) -> Declaration:
    return option(
        "--lora-experts",
        group=group,
        type=click.Choice(LORA_EXPERTS),
        help="How an adapter of experts orders lora_B: rank-major as PEFT does, expert-major as "
        "Unsloth did before 2026-09-17.  [default: what the adapter says, else as PEFT]",
    )


def dtype_option(help: str) -> Declaration:
    return option("--dtype", group=Group.RESULT, type=Dtype(), help=help)


# --- which weights ----------------------------------------------------------------------------


def include_option(help: str) -> Declaration:
    return option("--include", group=Group.WEIGHTS, multiple=True, metavar="GLOB", help=help)


def exclude_option(help: str) -> Declaration:
    return option("--exclude", group=Group.WEIGHTS, multiple=True, metavar="GLOB", help=help)


# --- checks -----------------------------------------------------------------------------------


def source_option(help: str, *, required: bool = False) -> Declaration:
    return option(
        "--source",
        group=Group.CHECKS,
        type=Place("file"),
        required=required,
        metavar="SRC",
        help=help,
    )


def tolerance_option(help: str) -> Declaration:
    return option("--tolerance", group=Group.CHECKS, type=float, help=help)


# --- where it comes from ----------------------------------------------------------------------

_revision_option = option(
    "--revision",
    group=Group.SOURCE,
    help="Take this branch, tag or commit of a model on the Hub.  [default: main]",
)
_subfolder_option = option(
    "--subfolder",
    group=Group.SOURCE,
    help="Take the checkpoint in this subfolder, such as transformer.",
)
_variant_option = option(
    "--variant",
    group=Group.SOURCE,
    help="Take the weight files with this word in their names, such as fp16.",
)
_gguf_file_option = option(
    "--gguf-file",
    group=Group.SOURCE,
    metavar="NAME",
    help="Take the GGUF file with this name, of several in a folder.",
)
_mmproj_option = option(
    "--mmproj",
    group=Group.SOURCE,
    metavar="FILE",
    help="For a GGUF file: read the tower that sees or hears from this one; needs --config-from.",
)
_config_from_option = option(
    "--config-from",
    group=Group.SOURCE,
    metavar="MODEL",
    help="For a GGUF file: take config.json and the tokenizer from this model.",
)
_stream_option = option(
    "--stream",
    group=Group.SOURCE,
    is_flag=True,
    help="Fetch weights from the Hub when they are needed, and keep no copy.",
)
_cache_dir_option = option(
    "--cache-dir",
    group=Group.SOURCE,
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep downloads in this folder.  [default: HF_HUB_CACHE]",
)
_local_files_only_option = option(
    "--local-files-only",
    group=Group.SOURCE,
    is_flag=True,
    help="Take what was downloaded before, and do not ask the Hub.",
)
_token_option = option(
    "--token",
    group=Group.SOURCE,
    help="Use this access token for the Hub.  [default: that of hf auth login]",
)

# The options of a command that runs models, which may be on the Hub. They fill SourceOptions.
model_options = several(
    _revision_option,
    _subfolder_option,
    _variant_option,
    _cache_dir_option,
    _local_files_only_option,
    _token_option,
)

# The options of a command that reads checkpoints, which may also be GGUF files.
repository_options = several(
    _revision_option,
    _subfolder_option,
    _variant_option,
    _gguf_file_option,
    _mmproj_option,
    _config_from_option,
    _cache_dir_option,
    _local_files_only_option,
    _token_option,
)

# The same for a command that reads each weight once, so that it can stream them.
repository_and_stream_options = several(
    _revision_option,
    _subfolder_option,
    _variant_option,
    _gguf_file_option,
    _mmproj_option,
    _config_from_option,
    _stream_option,
    _cache_dir_option,
    _local_files_only_option,
    _token_option,
)


# --- this machine -----------------------------------------------------------------------------


def device_option(help: str) -> Declaration:
    return option("--device", group=Group.MACHINE, default="auto", show_default=True, help=help)


_one_device_option = device_option("Compute on this device: auto, cpu, cuda or cuda:N.")
_many_devices_option = device_option(
    "Compute on this device: auto, cpu, cuda or cuda:N; or on several GPUs: cuda:all or "
    "cuda:0,cuda:1."
)
_workers_option = option(
    "--workers",
    group=Group.MACHINE,
    type=WholeNumber(0, 1024),
    default=0,
    show_default=True,
    metavar="N",
    help="Read, compute and write with this many threads; 0 lets nf4conv choose.",
)
_buffer_size_option = option(
    "--buffer-size",
    group=Group.MACHINE,
    type=Size(),
    default="64MB",
    show_default=True,
    help="Use this much memory for reading, all threads together.",
)
_ray_option = option(
    "--ray",
    group=Group.MACHINE,
    is_flag=True,
    help="Spread the work over a Ray cluster: that of RAY_ADDRESS, or a local one.",
)
_part_option = option(
    "--part",
    group=Group.MACHINE,
    metavar="I/N|auto",
    help="Make only part I of N; auto takes I and N from SLURM, Kubernetes or torchrun. "
    "`nf4conv finish OUT` puts the parts together.",
)
_overwrite_option = option(
    "--overwrite",
    group=Group.MACHINE,
    is_flag=True,
    help="Delete what is in OUT, and start anew.",
)
_checksum_option = option(
    "--checksum",
    group=Group.MACHINE,
    is_flag=True,
    help="Write SHA256SUMS, which `sha256sum -c` checks.",
)

# The options of a command that reads weights. They fill RunOptions, as do the next ones.
machine_options = several(_one_device_option, _workers_option, _buffer_size_option)

# The options of a command that writes a checkpoint.
writing_machine_options = several(
    _many_devices_option,
    _workers_option,
    _buffer_size_option,
    _ray_option,
    _part_option,
    _overwrite_option,
    _checksum_option,
)


# --- what is shown ----------------------------------------------------------------------------

_dry_run_option = option(
    "--dry-run",
    group=Group.DISPLAY,
    is_flag=True,
    help="Show what would become of SRC, and write nothing.",
)


def all_option(help: str) -> Declaration:
    return option("--all", "every", group=Group.DISPLAY, is_flag=True, help=help)


json_options = several(
    option(
        "--json",
        "as_json",
        group=Group.DISPLAY,
        is_flag=True,
        help="Print the result as JSON (docs/json.md).",
    ),
    option(
        "--json-file",
        group=Group.DISPLAY,
        type=FILE,
        help="Write the same JSON to this file.",
    ),
)


def quiet_option(help: str) -> Declaration:
    return option("-q", "--quiet", group=Group.DISPLAY, is_flag=True, help=help)


def verbose_option(help: str) -> Declaration:
    return option(
        "-v",
        "--verbose",
        group=Group.DISPLAY,
        is_flag=True,
        callback=show_log,
        help=help,
    )


verbose_log_option = verbose_option("Say what is done and how long it takes, on stderr.")


# The options of a command that writes a checkpoint. They fill Display, as do all of this group.
writing_display_options = several(
    _dry_run_option,
    all_option("With --dry-run, list every tensor."),
    json_options,
    quiet_option("Show no progress and no summary."),
    verbose_log_option,
)
