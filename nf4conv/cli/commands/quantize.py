"""`nf4conv quantize`: quantizes a checkpoint."""

from typing import Any, Final

import click

import nf4conv
from nf4conv.choices import (
    MOE,
    OUTPUTS,
    QUANT_STORAGES,
    QUANT_TYPES,
    SCALES,
)
from nf4conv.cli.chosen import (
    check_lora_experts,
    check_source_options,
    chosen,
    refuse_alone,
)
from nf4conv.cli.display import Display, silence_libraries, terminal_width
from nf4conv.cli.help import Command, Group, examples, option
from nf4conv.cli.options import (
    dtype_option,
    exclude_option,
    include_option,
    lora_experts_option,
    lora_option,
    max_shard_size_option,
    repository_and_stream_options,
    tolerance_option,
    writing_display_options,
    writing_machine_options,
)
from nf4conv.cli.parameters import Dtype, Place, Size, WholeNumber
from nf4conv.report.text.progress_bar import progress

_OF_CALIBRATION: Final = (
    "calibrate_output",
    "calibration_tokens",
    "calibration_seed",
    "calibration_memory",
)
"""Options that only change how --calibrate works."""


@click.command(
    cls=Command,
    epilog=examples(
        "quantize ./Llama-3.1-8B ./Llama-3.1-8B-nf4",
        "quantize ./model ./out --quant-type fp4 --dry-run",
        "quantize ./my-model ./out --verify --push-to-hub me/my-model-nf4",
        "quantize meta-llama/Llama-3.1-70B ./out --stream  # keeps no copy",
        "quantize ./DeepSeek-V3 ./shared/out --part 2/8  # 1/8, … elsewhere",
    ),
)
@click.argument("source", metavar="SRC", type=Place("file"))
@click.argument("out", metavar="OUT", type=Place("dir"))
@option(
    "--quant-type",
    group=Group.RESULT,
    type=click.Choice(QUANT_TYPES),
    help="Pack weights to this data type.  [default: nf4, or SRC's own]",
)
@option(
    "--blocksize",
    group=Group.RESULT,
    type=int,
    metavar="N",
    help="Let this many weights share one scale: 32, 64, … 4096.  [default: 64, or SRC's own]",
)
@option(
    "--double-quant/--no-double-quant",
    group=Group.RESULT,
    default=None,
    help="Quantize the scales too: 4.13 instead of 4.5 bits per weight.  "
    "[default: do, or as in SRC]",
)
@option(
    "--scales",
    group=Group.RESULT,
    type=click.Choice(SCALES),
    help="Scale each block by its largest value, as bitsandbytes does, or search for a scale "
    "with a smaller error.  [default: absmax, or SRC's own]",
)
@option(
    "--calibrate",
    group=Group.RESULT,
    multiple=True,
    metavar="TEXT",
    help="Let the model read this text (.txt, .jsonl, .npy) while it is quantized, and lose less. "
    "'default' takes what nf4conv ships. May be given again; TEXT=0.5 gives shares.",
)
@option(
    "--calibrate-output",
    group=Group.RESULT,
    type=click.Choice(OUTPUTS),
    help="With --calibrate, count how much the predictions depend on the outputs of queries, keys "
    "and values, or of all weights: one backward pass more.",
)
@option(
    "--calibration-tokens",
    group=Group.RESULT,
    type=WholeNumber(1),
    metavar="N",
    help="Calibrate by this number of tokens.  [default: 65536]",
)
@option(
    "--calibration-seed",
    group=Group.RESULT,
    type=int,
    metavar="N",
    help="Let this number decide which parts of TEXT are read.  [default: 0]",
)
@option(
    "--calibration-memory",
    group=Group.MACHINE,
    type=Size(),
    help="Keep so many bytes of hidden states in memory, and more in OUT.  [default: 4 GB]",
)
@option(
    "--quant-storage",
    group=Group.RESULT,
    type=click.Choice(QUANT_STORAGES),
    help="Store packed bytes in this dtype; FSDP needs a float dtype.  "
    "[default: uint8, or SRC's own]",
)
@lora_option(
    "First merge this PEFT adapter: a folder, or a model on the Hub, with or without @revision. "
    "SRC should be the 16-bit model, or a 4-bit one if the adapter was trained on that. May be "
    "given again."
)
@lora_experts_option()
@dtype_option(
    "Store what is not packed in this dtype; bf16, fp16 and fp32 are short names.  "
    "[default: that of config.json]"
)
@option(
    "--compute-dtype",
    group=Group.RESULT,
    type=Dtype(),
    help="Let loaders compute in this dtype.  [default: that of --dtype, but bfloat16 for float32]",
)
@max_shard_size_option
@option(
    "--single-file",
    group=Group.RESULT,
    is_flag=True,
    help="Make OUT one file for ComfyUI and Forge, with the tensor names of the model's authors.",
)
@include_option(
    "Pack only tensors whose names match, such as '*.layers.0.*', vision and audio towers too. May "
    "be given again."
)
@exclude_option("Keep tensors whose names match. May be given again.")
@option(
    "--moe",
    group=Group.WEIGHTS,
    type=click.Choice(MOE),
    help="Pack experts one by one (per-expert means the same) or as stacks of a layer, both of "
    "which transformers 5 loads with nf4conv installed; or keep them in 16 bits, which loads "
    "everywhere.  [default: packed if experts are most of the model, portable with --push-to-hub]",
)
@option(
    "--verify",
    group=Group.CHECKS,
    is_flag=True,
    help="Read back what was written, and compare it with SRC.",
)
@tolerance_option(
    "With --verify, let no weight have a larger relative error.  "
    "[default: 0.112 for NF4 in blocks of 64]"
)
@option(
    "--push-to-hub",
    group=Group.PUBLISHING,
    metavar="REPO",
    help="Upload the result to this model repository, shard by shard.",
)
@option(
    "--public",
    group=Group.PUBLISHING,
    is_flag=True,
    help="With --push-to-hub, let everybody see the repository.",
)
@option(
    "--create-pr",
    group=Group.PUBLISHING,
    is_flag=True,
    help="With --push-to-hub, open a pull request on the repository, which must exist.",
)
@option(
    "--base-model",
    group=Group.PUBLISHING,
    metavar="REPO",
    help="Name this original in the model card.  "
    "[default: where SRC is from, or what its config.json says]",
)
@repository_and_stream_options
@writing_machine_options
@writing_display_options
def quantize(source: str, out: str, **values: Any) -> None:
    """Quantize the checkpoint SRC into the folder OUT.

    SRC is a folder, a .safetensors or .gguf file, a torch pickle, or a model on the Hugging Face
    Hub. If SRC is quantized by another method, nf4conv decodes it on the way: GGUF, GPTQ, AWQ, HQQ,
    AutoRound, torchao, Quark, compressed-tensors, FP8, FP4 and 8-bit weights. If SRC is in 4 bits
    of bitsandbytes, nf4conv writes it anew for current loaders: weights in the format asked for, by
    default their own, stay bit for bit. In a diffusers pipeline, nf4conv packs denoisers and text
    encoders; --include 'transformer/*' chooses submodels.
    """
    from nf4conv.report.text.contents import plan_lines  # importing it holds up --help
    from nf4conv.report.text.runs import quantization_lines  # importing it holds up --help

    display = chosen(Display, values)
    run = chosen(nf4conv.RunOptions, values)
    options = chosen(nf4conv.QuantizeOptions, values)
    where = chosen(nf4conv.SourceOptions, values)
    push = chosen(nf4conv.PushOptions, values)
    _check_options(options, run, push)
    display.check_all()
    check_source_options(where, source)
    if display.quiet:
        silence_libraries()
    whole = nf4conv.plan_quantization(source, options, where, push)
    plan = nf4conv.plan_part(whole, run)
    if display.dry_run:
        described = nf4conv.describe_plan(plan)
        display.show(described, plan_lines(described, terminal_width(), every=display.every))
        return
    display.tell_notes(plan.notes)
    totals = plan.totals()
    work = totals.bytes_before
    verb = "quantizing"
    if run.verify:
        work += totals.bytes_before + totals.bytes_after
        verb = "quantizing and verifying"
    last = "finishing"
    if push.push_to_hub is not None:
        last = f"uploading to {push.push_to_hub}"
    calibration = whole.calibration
    with progress(verb, work, hidden=display.quiet, last=last, calibration=calibration) as advance:
        report = nf4conv.execute_quantization(plan, out, run, advance, push)
    display.show(report, quantization_lines(report))


def _check_options(
    options: nf4conv.QuantizeOptions, run: nf4conv.RunOptions, push: nf4conv.PushOptions
) -> None:
    """Refuses options that have no effect without another one."""
    if run.tolerance is not None and not run.verify:
        refuse_alone("--tolerance", needed="--verify")
    if push.public and push.push_to_hub is None:
        refuse_alone("--public", needed="--push-to-hub")
    if push.create_pr and push.push_to_hub is None:
        refuse_alone("--create-pr", needed="--push-to-hub")
    check_lora_experts(options.lora, options.lora_experts)
    if options.calibrate:
        return
    for name in _OF_CALIBRATION:
        if getattr(options, name) is not None:
            refuse_alone(f"--{name.replace('_', '-')}", needed="--calibrate")
