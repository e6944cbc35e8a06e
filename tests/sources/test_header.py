"""The safetensors header: literal bytes, and round trips."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import save

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.sources.header import build_header, parse_header, read_header


def test_literal_bytes():
    header = build_header([("weight", "F32", (2, 3), 0, 24)])
    text = (
        b'{"__metadata__":{"format":"pt"},'
        b'"weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    )
    assert header == (len(text) + 3).to_bytes(8, "little") + text + b"   "
    assert len(header) % 8 == 0


def test_the_format_s_own_library_reads_what_we_build(tmp_path):
    file = tmp_path / "file.safetensors"
    header = build_header(
        [("größe", "I32", (2,), 0, 8), ('quote"\\', "U8", (0,), 8, 8)], reserve=512
    )
    file.write_bytes(header + b"\x01\0\0\0\x02\0\0\0")
    assert len(header) == 512
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert opened.get_tensor("größe").tolist() == [1, 2]
        assert opened.get_tensor('quote"\\').shape == (0,)
    assert [tensor.name for tensor in read_header(file)] == ["größe", 'quote"\\']


def test_we_read_what_the_format_s_own_library_builds(tmp_path):
    file = tmp_path / "file.safetensors"
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(7),
    }
    file.write_bytes(save(tensors))
    raw = file.read_bytes()
    found = {tensor.name: tensor for tensor in read_header(file)}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (3,)),
        "c": ("I64", ()),
    }
    for name, tensor in tensors.items():
        stored = raw[found[name].start : found[name].stop]
        assert stored == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(["F32", "BF16", "U8", "I64"]), st.lists(st.integers(0, 5), max_size=3)
        ),
        max_size=8,
    ),
    st.integers(0, 4096),
)
@settings(max_examples=200, deadline=None)
def test_round_trip(tensors, reserve):
    entries, position = [], 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BITS[dtype] // 8
        for length in shape:
            size *= length
        entries.append((name, dtype, tuple(shape), position, position + size))
        position += size
    header = build_header(entries, reserve)
    found, metadata = parse_header(header[8:], Path("file"), len(header) + position)
    assert metadata == {"format": "pt"}
    expected = [
        (name, dtype, shape, len(header) + a, len(header) + b)
        for name, dtype, shape, a, b in entries
    ]
    assert sorted((t.name, t.dtype, t.shape, t.start, t.stop) for t in found) == sorted(expected)


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "not a JSON object"),
        ({"w": 1}, "w: the header entry lacks dtype, shape or two data_offsets"),
        ({"w": {"dtype": "F32", "shape": [1]}}, "w: the header entry lacks dtype, shape or two "),
        (entry(3, [1], [0, 4]), "w: unknown dtype 3"),
        (entry("F32", [-1], [0, 4]), r"w: \[-1\] is not a shape"),
        (entry("F32", [1.0], [0, 4]), r"w: \[1.0\] is not a shape"),
        (entry("F32", 1, [0, 4]), "w: the header entry lacks dtype, shape or two"),
        (entry("F32", [1], [4, 0]), r"w: \[4, 0\] are not data offsets"),
        (entry("F32", [1], [0]), "w: the header entry lacks dtype, shape or two"),
        (entry("F32", [2], [0, 4]), "w: 4 bytes, expected 8"),
        (entry("F32", [2**62] * 64, [0, 4]), "w: 4 bytes, expected"),
        (entry("F32", [1] * 65, [0, 4]), r"w: .{100}… is not a shape"),
        (entry("F32", [2**63, 0], [0, 0]), r"w: \[.*\] is not a shape"),
        (entry("U8", [8], [10**300, 10**300 + 8]), r"w: .* are not data offsets"),
        (entry("F" * 10**6, [1], [0, 4]), r"w: unknown dtype .{100}…;"),
        (entry("U8", [1], [4, 5]), "w: 4 unused bytes before it"),
        (entry("U8", [8], [0, 8]), "w: the file ends 3 bytes early"),
        (entry("U8", [4], [0, 4]), "1 bytes after the last tensor belong to none"),
        ({}, "5 bytes after the last tensor|5 unused|bytes"),
    ],
    ids=lambda value: None if isinstance(value, list | dict) else value.replace(" ", "-")[:30],
)
def test_malformed(table, message):
    raw = json.dumps(table).encode()
    with pytest.raises(SourceError, match=message):
        parse_header(raw, Path("file.safetensors"), 8 + len(raw) + 5)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_bytes_of_two_tensors_are_refused(start):
    """One byte is enough. If a tensor lies inside another, the file's size may still be right."""
    table = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [5 - start], "data_offsets": [start, 5]},
    }
    raw = json.dumps(table).encode()
    with pytest.raises(SourceError, match=r"^file: b: its bytes overlap those of a$"):
        parse_header(raw, Path("file"), 8 + len(raw) + 5)


def test_a_name_given_twice_is_found_out():
    raw = (
        b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
        b'"w":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}'
    )
    with pytest.raises(SourceError, match="w: 2 unused bytes before it"):
        parse_header(raw, Path("file"), 8 + len(raw) + 4)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"\xff", b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}',
    ],
    ids=["empty", "cut-off", "not-utf-8", "nested-too-deep", "number-of-5000-digits"],
)  # fmt: skip
def test_what_is_no_header_at_all(raw):
    with pytest.raises(SourceError, match=r"^file: the safetensors header is malformed: .+"):
        parse_header(raw, Path("file"), 8 + len(raw))


def test_a_name_that_no_header_can_hold():
    raw = b'{"a\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    with pytest.raises(SourceError, match="half a character"):
        parse_header(raw, Path("file"), 8 + len(raw))


def damage() -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)


@given(damage())
@settings(max_examples=400, deadline=None)
def test_any_damage_is_a_source_error_or_still_a_header_without_holes(places):
    tensors = [
        ("model.weight", "F32", (2, 3), 0, 24),
        ("b", "BF16", (4,), 24, 32),
        ("c", "U8", (), 32, 33),
    ]
    raw = bytearray(build_header(tensors)[8:])
    for place, value in places:
        raw[place % len(raw)] = value
    size = 8 + len(raw) + 33
    try:
        found, _ = parse_header(bytes(raw), Path("file"), size)
    except SourceError:
        return
    assert found[0].start == 8 + len(raw)
    assert [tensor.stop for tensor in found] == [*(tensor.start for tensor in found[1:]), size]
