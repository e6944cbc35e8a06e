"""torch pickles: the same tensors as torch.load finds, from the same bytes; and nothing in a pickle
is ever run.
"""

import argparse
import collections
import datetime
import functools
import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pace import time_limit

from nf4conv.errors import SourceError
from nf4conv.sources.pickle_header import read_pickle_header
from nf4conv.sources.tensors import TensorInfo

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
FORMATS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])


def save(path: Path, state: Any, is_zip: bool = True, **options: Any) -> Path:
    torch.save(state, path, _use_new_zipfile_serialization=is_zip, **options)
    return path


def load(tensor: TensorInfo) -> torch.Tensor:
    """The tensor that a TensorInfo describes."""
    if tensor.encoding is not None:
        stored = load(tensor.encoding.values)
        return torch.as_strided(stored, tensor.shape, tensor.encoding.strides)
    raw = tensor.file.read_bytes()[tensor.start : tensor.stop]
    return torch.tensor(list(raw), dtype=torch.uint8).view(TORCH[tensor.dtype]).view(tensor.shape)


def check_against_torch(path: Path) -> dict[str, TensorInfo]:
    expected = torch.load(path, weights_only=True)
    found = {tensor.name: tensor for tensor in read_pickle_header(path)}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert load(tensor).dtype == expected[name].dtype
        assert torch.equal(
            load(tensor).contiguous().view(-1).view(torch.uint8), raw_bytes(expected[name])
        ), name
        assert load(tensor).shape == expected[name].shape
    return found


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@FORMATS
def test_a_state_dict_is_read_as_torch_reads_it(tmp_path: Path, is_zip: bool):
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Embedding(3, 2)
    ).bfloat16()
    check_against_torch(save(tmp_path / "x.bin", model.state_dict(), is_zip))


NOT_IN_LEGACY = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "U16", "U32", "U64")
"""torch itself cannot write them."""


@pytest.mark.parametrize(
    ("tag", "is_zip"),
    [(tag, True) for tag in TORCH] + [(tag, False) for tag in TORCH if tag not in NOT_IN_LEGACY],
)
def test_every_dtype(tmp_path: Path, tag: str, is_zip: bool):
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = (raw % 2 if tag == "BOOL" else raw).view(TORCH[tag])
    found = check_against_torch(save(tmp_path / "x.bin", {"a": tensor}, is_zip))
    assert found["a"].dtype == tag


@FORMATS
def test_views_read_their_part_of_a_shared_storage(tmp_path: Path, is_zip: bool):
    whole = torch.randn(6, 4)
    state = {
        "whole": whole,
        "rows": whole[2:4],
        "tied": whole,
        "row": whole[5],
        "scalar": whole[1, 2],
    }
    path = save(tmp_path / "x.bin", state, is_zip)
    found = check_against_torch(path)
    assert found["tied"][4:] == found["whole"][4:]
    assert found["rows"].start == found["whole"].start + 2 * 4 * 4
    assert all(tensor.encoding is None for tensor in found.values())


@FORMATS
def test_tensors_whose_elements_are_not_in_order(tmp_path: Path, is_zip: bool):
    whole = torch.randn(6, 4)
    state = {"transposed": whole.t(), "columns": whole[:, 1:3], "expanded": whole[:1].expand(3, 4)}
    found = check_against_torch(save(tmp_path / "x.bin", state, is_zip))
    assert [tensor.encoding is not None for tensor in found.values()] == [True, True, True]
    assert found["columns"].encoding.values.shape == (5 * 4 + 2,)


@FORMATS
def test_shapes_without_elements_or_dimensions(tmp_path: Path, is_zip: bool):
    state = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "ones": torch.ones(1, 3, 1).transpose(0, 2),
    }
    found = check_against_torch(save(tmp_path / "x.bin", state, is_zip))
    assert all(tensor.encoding is None for tensor in found.values())


@FORMATS
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol(tmp_path: Path, protocol: int, is_zip: bool):
    state = collections.OrderedDict(
        a=torch.nn.Parameter(torch.randn(3, 4)), b=torch.nn.Buffer(torch.ones(2))
    )
    path = save(tmp_path / "x.bin", state, is_zip, pickle_protocol=protocol)
    assert {tensor.name for tensor in read_pickle_header(path)} == {"a", "b"}


@FORMATS
def test_the_state_dict_of_a_training_checkpoint(tmp_path: Path, is_zip: bool):
    path = save(
        tmp_path / "x.bin",
        {"state_dict": {"a": torch.ones(2)}, "epoch": 3, "loss": 0.5, "notes": []},
        is_zip,
    )
    assert [tensor.name for tensor in read_pickle_header(path)] == ["a"]


# --- what is more than tensors --------------------------------------------------------------------


class Executes:
    """Unpickled, creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@FORMATS
def test_nothing_is_executed(tmp_path: Path, is_zip: bool):
    victim = tmp_path / "victim"
    path = save(tmp_path / "x.bin", {"a": torch.ones(2), "b": Executes(victim)}, is_zip)
    with pytest.raises(SourceError, match=r"x\.bin: needs (builtins|__builtin__)\.getattr"):
        read_pickle_header(path)
    assert not victim.exists()
    torch.load(path, weights_only=False)
    assert victim.exists(), "the pickle does nothing, so the test proves nothing"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (argparse.Namespace(lr=1), r"argparse\.Namespace"),
        (
            np.ones(3),
            r"numpy\._core\.multiarray\._reconstruct|numpy\.core\.multiarray\._reconstruct",
        ),
        (datetime.date(2020, 1, 1), r"datetime\.date"),
        (torch.nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear"),
        (torch.ones(3).to_sparse(), r"torch\._utils\._rebuild_sparse_tensor"),
        (collections.defaultdict(int), r"collections\.defaultdict"),
        (set(), r"builtins\.set|__builtin__\.set"),
        (b"bytes", r"_codecs\.encode"),
        (torch.device("cpu"), r"torch\.device"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
@FORMATS
def test_what_is_more_than_tensors_is_refused_by_name(
    tmp_path: Path, value: object, name: str, is_zip: bool
):
    path = save(tmp_path / "x.bin", {"a": torch.ones(2), "b": value}, is_zip)
    with pytest.raises(SourceError, match=rf"needs ({name}); only pickles of tensors are read"):
        read_pickle_header(path)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"a": torch.ones(2), "steps": 3}, "steps: a int, not a tensor"),
        ({"a": {"b": torch.ones(2)}}, "a: a dict, not a tensor"),
        ([torch.ones(2)], "holds a list, not a state dict"),
        (torch.ones(2), "holds a StoredTensor, not a state dict"),
        ({3: torch.ones(2)}, "3: a StoredTensor, not a tensor"),
    ],
    ids=["number", "nested", "list", "tensor", "integer-name"],
)
@FORMATS
def test_what_is_no_state_dict_is_refused(tmp_path: Path, state: object, reason: str, is_zip: bool):
    with pytest.raises(SourceError, match=reason):
        read_pickle_header(save(tmp_path / "x.bin", state, is_zip))


# --- malformed ------------------------------------------------------------------------------------


def rezip(
    path: Path, change: dict[str, bytes | None], compression: int = zipfile.ZIP_STORED
) -> Path:
    """The archive with some entries replaced, or removed (None), or all compressed."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    folder = next(iter(entries)).partition("/")[0]
    entries |= {f"{folder}/{name}": content for name, content in change.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            if content is not None:
                archive.writestr(name, content)
    return path


def forged(path: Path, *arguments: Any) -> Path:
    """An archive of one tensor, whose view of its 4-element storage is as given: offset, shape,
    stride.
    """

    class Forged:
        def __reduce__(self) -> Any:
            storage = torch.storage.TypedStorage(
                wrap_storage=torch.ones(4).untyped_storage(), dtype=torch.float32
            )
            return torch._utils._rebuild_tensor_v2, (
                storage,
                *arguments,
                False,
                collections.OrderedDict(),
            )

    return save(path, {"a": Forged()})


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        ((0, (5,), (1,)), "a: reaches beyond the end of its storage"),
        ((2, (3,), (1,)), "a: reaches beyond the end of its storage"),
        ((0, (2, 2), (3, 1)), "a: reaches beyond the end of its storage"),
        ((-1, (2,), (1,)), "make no tensor"),
        ((0, (2,), (-1,)), "make no tensor"),
        ((0, (2, 2), (1,)), "make no tensor"),
        ((0, (True,), (1,)), "make no tensor"),
        ((0, ("2",), (1,)), "make no tensor"),
        ((0, (2**60, 2**60), (1, 1)), "a: reaches beyond the end of its storage"),
    ],
    ids=[
        "long",
        "offset",
        "stride",
        "negative-offset",
        "negative-stride",
        "ranks",
        "bool",
        "string",
        "huge",
    ],
)
def test_a_view_that_its_storage_does_not_hold(tmp_path: Path, view: tuple[Any, ...], reason: str):
    with pytest.raises(SourceError, match=reason):
        read_pickle_header(forged(tmp_path / "x.bin", *view))


def test_the_forged_view_is_read_when_it_fits(tmp_path: Path):
    [tensor] = read_pickle_header(forged(tmp_path / "x.bin", 1, (3,), (1,)))
    assert load(tensor).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "compression", "reason"),
    [
        ({"data/0": None}, zipfile.ZIP_STORED, "a: the bytes of its storage are missing"),
        ({"data/0": b"short"}, zipfile.ZIP_STORED, "a: the bytes of its storage are missing"),
        ({"data.pkl": None}, zipfile.ZIP_STORED, "without a data.pkl"),
        ({"byteorder": b"big"}, zipfile.ZIP_STORED, "big-endian"),
        ({}, zipfile.ZIP_DEFLATED, "is compressed"),
        ({"data.pkl": b"no pickle"}, zipfile.ZIP_STORED, "not a pickle of a state dict"),
        ({"data.pkl": b""}, zipfile.ZIP_STORED, "not a pickle of a state dict"),
        (
            {"data.pkl": b"\x80\x02\x8d" + b"\xff" * 7 + b"\x7f."},
            zipfile.ZIP_STORED,
            "not a pickle of a state dict",
        ),
        (
            {"data.pkl": b"\x80\x02]q\x00}q\x01h\x00K\x01s."},
            zipfile.ZIP_STORED,
            "a list is a key",
        ),
    ],
    ids=[
        "no-data",
        "short",
        "no-pickle",
        "big",
        "compressed",
        "text",
        "empty",
        "endless-string",
        "unhashable-key",
    ],
)
def test_malformed_archives(
    tmp_path: Path, change: dict[str, bytes | None], compression: int, reason: str
):
    path = rezip(save(tmp_path / "x.bin", {"a": torch.ones(8)}), change, compression)
    with pytest.raises(SourceError, match=reason):
        read_pickle_header(path)


@FORMATS
def test_no_truncation_gives_a_tensor_beyond_the_file(tmp_path: Path, is_zip: bool):
    whole = save(
        tmp_path / "x.bin", {"a": torch.ones(8), "b": torch.ones(3, dtype=torch.int8)}, is_zip
    ).read_bytes()
    cut = tmp_path / "cut.bin"
    for length in range(0, len(whole), 7):
        cut.write_bytes(whole[:length])
        with pytest.raises(SourceError, match=r"cut\.bin: "):
            read_pickle_header(cut)


@functools.cache
def sound(*, is_zip: bool) -> bytes:
    """Made once: a legacy file names its storages by their addresses, so its length differs from
    one to the next.
    """
    buffer = io.BytesIO()
    torch.save(
        {"a": torch.ones(8), "b": torch.ones(4, 4).t()},
        buffer,
        _use_new_zipfile_serialization=is_zip,
    )
    return buffer.getvalue()


@FORMATS
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=150,
)
@given(data=st.data())
def test_damage_is_an_error_or_harmless(tmp_path: Path, is_zip: bool, data: st.DataObject):
    """Whatever bytes are changed, the reader answers with its own error or with tensors inside the
    file.
    """
    raw = bytearray(sound(is_zip=is_zip))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.bin"
    path.write_bytes(raw)
    try:
        tensors = read_pickle_header(path)
    except SourceError:
        return
    for tensor in tensors:
        assert 0 <= tensor.start <= tensor.stop <= len(raw)


def test_a_plain_pickle_is_no_file_of_torch(tmp_path: Path):
    path = tmp_path / "x.bin"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(SourceError, match="neither a zip archive nor a legacy file of torch"):
        read_pickle_header(path)


# --- small programs that want much ----------------------------------------------------------------


@pytest.fixture
def _in_no_time() -> Iterator[None]:
    """Fails a test that hangs."""
    with time_limit(20):
        yield


def program(path: Path, code: bytes) -> Path:
    """An archive whose data.pkl is this code after the opcode that says which protocol."""
    return rezip(save(path, {"a": torch.ones(4)}), {"data.pkl": b"\x80\x02" + code})


DOUBLED = b")" + b"q\x00h\x00\x86" * 40
"""A tuple of two that are one and the same, forty times over: 2^40 to hash, to compare or to print,
in 160 bytes.
"""

ORDERED = b"ccollections\nOrderedDict\n"
COPIES = (b"ccollections\nOrderedDict\nh\x00\x85R") * 3000
VIEW = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
)


@pytest.mark.usefixtures("_in_no_time")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (b"}" + DOUBLED + b"Ns.", "a tuple is a key"),
        (b"}(" + DOUBLED + b"Nu.", "a tuple is a key"),
        (b"(" + DOUBLED + b"Nd.", "a tuple is a key"),
        (ORDERED + b"](" + DOUBLED + b"N\x86e\x85R.", "a tuple is a key"),
        (DOUBLED + DOUBLED + b"\x93.", "STACK_GLOBAL requires str"),
        (DOUBLED + b")R.", "calls a tuple"),
        (DOUBLED + b"Q.", "needs the object a tuple"),
        (b"(" + DOUBLED + b"NNNNtQ.", "of the kind a tuple"),
        (
            b"(X\x07\x00\x00\x00storage" + DOUBLED + b"X\x01\x00\x00\x000NK\x04tQ.",
            "a tuple is no storage",
        ),
        (
            b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000N"
            + DOUBLED
            + b"tQ.",
            "a tuple is no size",
        ),
        (VIEW + b"(" + STORAGE + b"K\x00" + DOUBLED + b"K\x01\x85tR.", "is no size"),
        (VIEW + b"(" + DOUBLED + b"K\x00K\x04\x85K\x01\x85tR.", "without a storage"),
        (b"}X\x01\x00\x00\x00a" + VIEW + b"(K\x07K\x00K\x04\x85K\x01\x85tRs.", "without a storage"),
        (b"}X\x01\x00\x00\x00aK\x07s.", "a: a int, not a tensor"),
        (b"}X\x01\x00\x00\x00a" + b")" + b"\x85" * 300_000 + b"s.", "a: a tuple, not a tensor"),
        (b"}" + b")" + b"\x85" * 300_000 + b"Ns.", "a tuple is a key"),
        (b"(" * 300_000, "EOFError"),
        (b"]" * 3_000_000 + b".", "more than 2,097,152 steps"),
        (b"](" + b"K\x01N\x86" * 1000 + b"eq\x00" + COPIES + b".", "more than 2,097,152 steps"),
        (
            VIEW
            + b"("
            + STORAGE
            + b"K\x00("
            + b"K\x01" * 200_000
            + b"t("
            + b"K\x01" * 200_000
            + b"ttR.",
            "is no shape",
        ),
        (b"\x8b\x00\x00\x10\x00" + b"\x7f" * 2**20 + b".", "holds a int, not a state dict"),
        (b"}X\x04\x00\x00\x00\xed\xa0\x80aK\x01s.", "not a tensor"),
        (ORDERED + b"]R.", "other arguments than it takes"),
        (ORDERED + b"(" + b"K\x01" * 20 + b"tR.", "other arguments than it takes"),
    ],
    ids=[
        *(
            "key",
            "keys",
            "dict",
            "pairs",
            "name",
            "function",
            "identity",
            "kind",
            "storage",
            "elements",
            "shape",
        ),
        *(
            "no storage",
            "a number for one",
            "number",
            "deep value",
            "deep key",
            "deep marks",
            "long",
            "copies",
        ),
        *("dimensions", "number of bytes", "half a character", "no arguments", "many arguments"),
    ],
)
def test_a_program_that_would_take_for_ever_is_refused_at_once(
    tmp_path: Path, code: bytes, reason: str
):
    with pytest.raises(SourceError, match=reason) as caught:
        read_pickle_header(program(tmp_path / "x.bin", code))
    assert len(str(caught.value)) < 1000


def test_names_that_no_header_can_hold_are_refused_before_the_work(tmp_path: Path):
    with pytest.raises(SourceError, match="half a character"):
        read_pickle_header(save(tmp_path / "x.bin", {"a\ud800b": torch.ones(2)}))


@FORMATS
def test_a_few_bytes_do_not_become_gigabytes(tmp_path: Path, is_zip: bool):
    path = save(tmp_path / "x.bin", {"a": torch.ones(1).expand(2**15, 2**15)}, is_zip)
    assert path.stat().st_size < 4000
    with pytest.raises(SourceError, match=r"a: .* of 1 values, more than the file holds"):
        read_pickle_header(path)


@pytest.mark.parametrize("damage", ["offset", "compressed byteorder"])
def test_archives_that_lead_zipfile_astray(tmp_path: Path, damage: str):
    path = save(tmp_path / "x.bin", {"a": torch.ones(8)})
    raw = bytearray(path.read_bytes())
    name = b"x/data/0" if damage == "offset" else b"x/byteorder"
    entry = raw.index(name, raw.index(b"PK\x01\x02")) - 46
    if damage == "offset":
        raw[entry + 42 : entry + 46] = b"\xf0\xff\xff\xfe"
    else:
        raw[entry + 10 : entry + 12] = b"\x08\x00"
    path.write_bytes(raw)
    with pytest.raises(SourceError, match=r"x\.bin: "):
        read_pickle_header(path)


def test_a_directory_larger_than_any_is_not_read(tmp_path: Path):
    path = tmp_path / "x.bin"
    size = 2**31 - 1
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(
            b"PK\x05\x06" + bytes(4) + b"\x01\x00\x01\x00" + size.to_bytes(4, "little") + bytes(6)
        )
    with pytest.raises(SourceError, match="a directory of 2,147,483,647 bytes"):
        read_pickle_header(path)
