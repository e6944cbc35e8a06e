"""Options refuse values that they cannot have when they are made, in the words of Python."""

import copy
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
from checkpoints import write_source
from click.testing import CliRunner

import nf4conv
from nf4conv import (
    CompareOptions,
    DequantizeOptions,
    EvaluateOptions,
    QuantizeOptions,
    RunOptions,
    VerifyOptions,
)
from nf4conv.choices import BLOCKSIZES
from nf4conv.cli import main
from nf4conv.errors import OptionError, PlanError
from nf4conv.format import codebook
from nf4conv.options import CHOICES

NAMES = [
    (kind, field.name)
    for kind in (QuantizeOptions, DequantizeOptions, VerifyOptions, CompareOptions)
    for field in fields(kind)
    if str(field.type) == "tuple[str, ...]"
]


def test_these_are_the_fields_that_hold_names():
    assert {name for _, name in NAMES} == {
        "include",
        "exclude",
        "lora",
        "calibrate",
    }


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_str_is_not_taken_for_several_names(kind, name):
    with pytest.raises(OptionError) as refused:
        kind(**{name: "*.layers.0.*"})
    assert str(refused.value) == (
        f"{name}='*.layers.0.*': expected several names, such as ('*.layers.0.*',)"
    )


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_list_of_names_is_as_good_as_a_tuple(kind, name):
    assert kind(**{name: ["a", "b"]}) == kind(**{name: ("a", "b")})


@pytest.mark.parametrize(
    ("kind", "name", "value", "expected"),
    [
        (QuantizeOptions, "quant_type", "nf5", "one of nf4, fp4"),
        (QuantizeOptions, "quant_type", "NF4", "one of nf4, fp4"),
        (QuantizeOptions, "blocksize", 100, "one of 32, 64, 128, 256, 512, 1024, 2048, 4096"),
        (QuantizeOptions, "scales", "searched", "one of absmax, search"),
        (QuantizeOptions, "dtype", "bf16", "one of bfloat16, float16, float32"),
        (QuantizeOptions, "moe", "experts", "one of packed, stacked, portable, per-expert"),
        (QuantizeOptions, "max_shard_size", "5GB", "a whole number from 1 on"),
        (QuantizeOptions, "include", None, "a tuple of names, each of which is a str"),
        (QuantizeOptions, "exclude", (1,), "a tuple of names, each of which is a str"),
        (QuantizeOptions, "calibration_tokens", 0, "a whole number from 1 on"),
        (DequantizeOptions, "dtype", "float64", "one of bfloat16, float16, float32"),
        (VerifyOptions, "tolerance", float("inf"), "a relative error such as 0.1"),
        (EvaluateOptions, "tokens", 1, "a whole number from 2 on"),
        (EvaluateOptions, "max_kl", -1.0, "a divergence in nats, such as 0.05"),
        (RunOptions, "device", "mps", "auto, cpu, cuda or cuda:N; on a Mac, cpu is the one"),
        (RunOptions, "device", "cuda:x", "auto, cpu, cuda or cuda:N"),
        (RunOptions, "device", 0, "auto, cpu, cuda or cuda:N"),
        (RunOptions, "workers", True, "a whole number from 0 on"),
        (RunOptions, "part", "3/2", "auto, or I/N with I from 1 to N, such as 2/3"),
    ],
)
def test_a_wrong_value_is_refused_in_the_words_of_python(kind, name, value, expected):
    with pytest.raises(OptionError) as refused:
        kind(**{name: value})
    error = refused.value
    assert str(error) == f"{name}={value!r}: expected {expected}"
    assert (error.option, error.value, error.expected) == (name, value, expected)
    assert isinstance(error, PlanError)
    assert isinstance(error, ValueError)
    again = copy.copy(error)  # by what pickle takes, too
    assert (str(again), again.value) == (str(error), value)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3", "cuda:all", "cuda:0,cuda:1"])
def test_devices(device):
    assert RunOptions(device=device).device == device


def test_types_and_checks_agree():
    hints = get_type_hints(QuantizeOptions)
    for name, values in {**CHOICES, "blocksize": BLOCKSIZES}.items():
        spelled = [part for part in get_args(hints[name]) or () if part is not type(None)]
        literals = [get_args(part) or (part,) for part in spelled]
        assert tuple(value for part in literals for value in part) == values, name
    assert BLOCKSIZES == codebook.BLOCKSIZES


def test_one_glob_in_a_tuple_packs_what_it_says(tmp_path):
    """As a str it matched everything, by the asterisk that is one of its letters."""
    source = write_source(tmp_path / "source")
    plan = nf4conv.plan_quantization(source, QuantizeOptions(include=("*.layers.0.*",)))
    assert plan.totals().packed == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--blocksize", "100"], "--blocksize 100: expected one of 32, 64, "),
        (["--device", "gpu"], "--device gpu: expected auto, cpu, cuda or cuda:N; an NVIDIA GPU"),
        (["--part", "4/3"], "--part 4/3: expected auto, or I/N"),
        (["--verify", "--tolerance", "-1"], "--tolerance -1.0: expected a relative error"),
    ],
)
def test_the_command_line_says_it_in_its_own_words(arguments, line):
    done = CliRunner().invoke(main, ["quantize", "SRC", "OUT", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {line}")


def test_evaluate_refuses_a_device_too(tmp_path):
    with pytest.raises(OptionError, match="device='gpu'"):
        nf4conv.evaluate_checkpoints([tmp_path], tmp_path, device="gpu")
