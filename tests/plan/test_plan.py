"""Properties that every plan has, and what a large one costs."""

import itertools
import math
from pathlib import Path

import pytest

from nf4conv.choose.decisions import Keep, Pack, PackedMatrix
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.format.layout import Format
from nf4conv.options import QuantizeOptions
from nf4conv.plan.arrange import arrange
from nf4conv.plan.fingerprint import named_options, plan_fingerprint
from nf4conv.plan.jobs import CopyJob, PackJob, Plan, component_name
from nf4conv.plan.quantization import jobs_of
from nf4conv.sources.header import build_header
from nf4conv.sources.tensors import TensorInfo

FORMATS = [
    Format(quant_type, blocksize, double_quant, dtype)
    for quant_type, blocksize, double_quant, dtype in itertools.product(
        ("nf4", "fp4"), (64, 4096), (False, True), ("bfloat16", "float32")
    )
]
LIMITS = [1, 5_000, 40_000, 10**9]


def example() -> tuple[list[TensorInfo], dict[str, Pack | Keep]]:
    tensors, decisions, position = [], {}, 0
    for number, (dtype, shape) in enumerate(
        [
            ("BF16", (33, 65)),
            ("F32", (64, 64)),
            ("BF16", (7,)),
            ("I64", (3,)),
            ("U8", (5,)),
            ("F16", (128, 96)),
            ("F32", ()),
        ]
    ):
        name = f"module.{number}.weight"
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        tensors.append(TensorInfo(name, dtype, shape, Path("file"), position, position + size))
        decisions[name] = (
            Pack((PackedMatrix(name, shape),), "linear") if len(shape) == 2 else Keep("other")
        )
        position += size
    return tensors, decisions


def plan_of(
    tensors: list[TensorInfo], decisions: dict[str, Pack | Keep], format: Format, limit: int = 10**9
) -> Plan:
    groups = [jobs_of(tensor, decisions[tensor.name], format) for tensor in tensors]
    return arrange(groups, format, max_shard_size=limit)


@pytest.mark.parametrize(
    "format", FORMATS, ids=lambda f: f"{f.quant_type}-{f.blocksize}-{f.double_quant}-{f.dtype}"
)
def test_properties(format):
    for limit in LIMITS:
        tensors, decisions = example()
        plan = plan_of(tensors, decisions, format, limit)
        assert plan == plan_of(tensors, decisions, format, limit)
        assert [job.source.name for job in plan.jobs] == [tensor.name for tensor in tensors]
        for number, shard in enumerate(plan.shards, start=1):
            single = len(plan.shards) == 1
            assert shard.name == (
                "model.safetensors"
                if single
                else f"model-{number:05d}-of-{len(plan.shards):05d}.safetensors"
            )
            assert len(shard.jobs) == 1 or sum(job.nbytes for job in shard.jobs) <= limit
            assert shard.header_size % 8 == 0
            entries = sorted(shard.entries(), key=lambda entry: entry[3:])
            position = 0
            for name, dtype, shape, start, stop in entries:
                assert start == position, name  # neither a hole nor an overlap
                assert stop - start == math.prod(shape) * DTYPE_BITS[dtype] // 8
                assert start % max(DTYPE_BITS[dtype] // 8, 1) == 0
                position = stop
            assert position == shard.fixed_size
            # every name once, all components of a weight here, and the header as long as it can get
            # still fits
            names = []
            for job in shard.jobs:
                parts = job.components if isinstance(job, PackJob) else ()
                names += [component_name(job, part) for part in parts] or [job.name]
            blobs = [name for name in names if "quant_state" in name]
            assert sorted(names) == sorted([entry[0] for entry in entries] + blobs)
            packed = [job for job in shard.jobs if isinstance(job, PackJob)]
            assert len(blobs) == len(packed)
            longest = [
                (job.components[-1].nbytes, blob) for job, blob in zip(packed, blobs, strict=True)
            ]
            full = list(shard.entries())
            for nbytes, blob in longest:
                full.append((blob, "U8", (nbytes,), position, position + nbytes))
                position += nbytes
            assert len(build_header(full)) <= shard.header_size
            assert shard.header_size + position == shard.largest_size


def test_kept_tensors_take_the_checkpoint_s_dtype_unless_they_are_float32_by_design():
    tensors, decisions = example()
    decisions["module.6.weight"] = Keep("by design", keep_dtype=True)
    plan = plan_of(tensors, decisions, FORMATS[0])
    dtypes = {job.name: job.dtype for job in plan.jobs if isinstance(job, CopyJob)}
    assert dtypes == {
        "module.2.weight": "BF16",
        "module.3.weight": "I64",
        "module.4.weight": "U8",
        "module.6.weight": "F32",
    }


def test_two_outputs_of_one_name_are_refused():
    tensors, decisions = example()
    decisions["module.0.weight"] = Pack((PackedMatrix("module.1.weight", (33, 65)),), "linear")
    with pytest.raises(
        PlanError, match=r"module.1.weight: two output tensors would have this name"
    ):
        plan_of(tensors, decisions, FORMATS[0])


@pytest.mark.parametrize(
    "suffix", ["quant_map", "nested_absmax", "absmax", "quant_state.bitsandbytes__nf4"]
)
def test_a_kept_tensor_named_as_a_component_of_a_packed_one_is_refused(suffix):
    tensors, decisions = example()
    name = f"module.0.weight.{suffix}"
    tensors.append(TensorInfo(name, "F32", (4,), Path("file"), 0, 16))
    with pytest.raises(PlanError) as caught:
        plan_of(tensors, decisions | {name: Keep("other")}, FORMATS[2])
    assert (
        str(caught.value)
        == f"file: {name}: a tensor of the packed module.0.weight would have this name"
    )


def test_a_plan_decided_otherwise_has_another_fingerprint():
    """So that a run is not resumed with a tensor packed in one shard and unpacked in the next."""
    tensors, decisions = example()

    def fingerprint(changes: dict[str, Pack | Keep], limit: int = 5_000) -> str:
        return plan_fingerprint(plan_of(tensors, decisions | changes, FORMATS[0], limit))

    expected = fingerprint({})
    assert fingerprint({"module.2.weight": Keep("for another reason")}) == expected
    assert fingerprint({"module.1.weight": Keep("demoted")}) != expected
    assert fingerprint({"module.1.weight": Keep("demoted")}, limit=10**9) != fingerprint(
        {}, limit=10**9
    )
    assert (
        fingerprint({"module.1.weight": Pack((PackedMatrix("other.weight", (64, 64)),), "renamed")})
        != expected
    )
    assert fingerprint({}, limit=40_000) != expected


def test_where_the_text_of_a_calibration_is_decides_nothing():
    """A run goes on after its text was moved: what counts is its digest."""
    made = [named_options(QuantizeOptions(calibrate=text)) for text in ("here.txt", "there.txt")]
    assert made[0] == made[1]
    assert made[0] != named_options(QuantizeOptions(calibrate="here.txt", calibration_tokens=512))
