"""torch pickles: the same tensors as torch.load finds, from the same bytes; and nothing in a pickle
is ever run.
"""

import argparse
import collections
import datetime
import functools
import io
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nf4conv.errors import SourceError
from nf4conv.format.dtypes import TORCH_NAMES
from nf4conv.sources.pickle_header import read_pickle_header
from nf4conv.sources.tensors import TensorInfo

FORMATS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before-1.6"])


def save(path: Path, state: Any, is_zip: bool = True, **options: Any) -> Path:
    torch.save(state, path, _use_new_zipfile_serialization=is_zip, **options)
    return path


def load(tensor: TensorInfo) -> torch.Tensor:
    """The tensor that a TensorInfo describes."""
    if tensor.encoding is not None:
        stored = load(tensor.encoding.values)
        return torch.as_strided(stored, tensor.shape, tensor.encoding.strides)
    raw = tensor.file.read_bytes()[tensor.start : tensor.stop]
    bytes_of_it = torch.tensor(list(raw), dtype=torch.uint8)
    return bytes_of_it.view(getattr(torch, TORCH_NAMES[tensor.dtype])).view(tensor.shape)


def check_against_torch(path: Path) -> dict[str, TensorInfo]:
    expected = torch.load(path, weights_only=True)
    found = {tensor.name: tensor for tensor in read_pickle_header(path)}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert load(tensor).dtype == expected[name].dtype
        assert torch.equal(raw_bytes(load(tensor)), raw_bytes(expected[name])), name
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
    parameters = {"a": torch.nn.Parameter(torch.randn(3, 4)), "b": torch.nn.Buffer(torch.ones(2))}
    check_against_torch(save(tmp_path / "x.bin", parameters, is_zip))


def test_every_dtype(tmp_path: Path):
    raw = torch.arange(48, dtype=torch.uint8)
    state = {}
    for tag, name in TORCH_NAMES.items():
        own = raw % 2 if tag == "BOOL" else raw.clone()
        state[tag] = own.view(getattr(torch, name))
    found = check_against_torch(save(tmp_path / "x.bin", state))
    assert {name: tensor.dtype for name, tensor in found.items()} == {tag: tag for tag in state}


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
    found = check_against_torch(save(tmp_path / "x.bin", state, is_zip))
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
def test_the_state_dict_of_a_training_checkpoint(tmp_path: Path, is_zip: bool):
    state = {"state_dict": {"a": torch.ones(2)}, "epoch": 3, "loss": 0.5, "notes": []}
    path = save(tmp_path / "x.bin", state, is_zip)
    assert [tensor.name for tensor in read_pickle_header(path)] == ["a"]


def test_tensors_of_a_gpu_are_read_without_one(tmp_path: Path):
    path = save(tmp_path / "x.bin", {"a": torch.ones(2)})
    rezip(path, {"data.pkl": entry(path, "data.pkl").replace(b"\3\0\0\0cpu", b"\6\0\0\0cuda:1")})
    [tensor] = read_pickle_header(path)
    assert load(tensor).tolist() == [1.0, 1.0]


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
    with pytest.raises(SourceError, match=r"x\.bin: Unsupported global: GLOBAL getattr"):
        read_pickle_header(path)
    assert not victim.exists()
    torch.load(path, weights_only=False)
    assert victim.exists(), "the pickle does nothing, so the test proves nothing"


@FORMATS
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"a": argparse.Namespace(lr=1)}, r"GLOBAL argparse\.Namespace was not .*; only pickles"),
        ({"a": datetime.date(2020, 1, 1)}, r"GLOBAL datetime\.date was not an allowed"),
        ({"a": torch.nn.Linear(2, 2)}, r"GLOBAL torch\.nn\.modules\.linear\.Linear was not"),
        ({"a": torch.ones(3).to_sparse()}, r"x\.bin: .*; only pickles of tensors"),
        ({"a": torch.ones(2), "steps": 3}, "steps: a int, not a named tensor"),
        ({"a": {"b": torch.ones(2)}}, "a: a dict, not a named tensor"),
        ([torch.ones(2)], "holds a list, not a state dict"),
        (torch.ones(2), "holds a FakeTensor, not a state dict"),
        ({3: torch.ones(2)}, "3: a FakeTensor, not a named tensor"),
        ({"a": torch.ones(2, 3, dtype=torch.int64).t()}, "a: I64 whose elements are not in order"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, r"a: a tensor of torch\.complex128"),
        ({"a\ud800b": torch.ones(2)}, "half a character"),
    ],
    ids=[
        *("namespace", "date", "module", "sparse", "number", "nested", "list", "tensor"),
        *("integer-name", "integers", "complex", "surrogate"),
    ],
)
def test_what_is_no_state_dict_of_tensors_is_refused(
    tmp_path: Path, is_zip: bool, state: object, reason: str
):
    with pytest.raises(SourceError, match=reason):
        read_pickle_header(save(tmp_path / "x.bin", state, is_zip))


@FORMATS
def test_system_is_not_called(tmp_path: Path, is_zip: bool):
    class Calls:
        def __reduce__(self) -> Any:
            return os.system, ("false",)

    path = save(tmp_path / "x.bin", Calls(), is_zip)
    with pytest.raises(SourceError, match=r"GLOBAL \w+\.system whose module \w+ is blocked"):
        read_pickle_header(path)


def test_a_file_from_before_torch_1_6_has_the_bytes_of_an_archive(tmp_path: Path):
    whole = torch.randn(6, 4)
    state = {"whole": whole, "tied": whole, "rows": whole[2:4], "other": torch.ones(3).half()}
    files = [save(tmp_path / f"{is_zip}.bin", state, is_zip) for is_zip in (True, False)]
    contents = []
    for file in files:
        found = {}
        for tensor in read_pickle_header(file):
            found[tensor.name] = file.read_bytes()[tensor.start : tensor.stop]
        contents.append(found)
    assert contents[0] == contents[1]
    assert sum(map(len, contents[0].values())) == (24 + 24 + 8) * 4 + 3 * 2


def test_storages_of_older_torch_that_are_not_where_they_should_be(tmp_path: Path):
    path = save(tmp_path / "x.bin", {"a": torch.ones(2)}, False)
    raw = path.read_bytes()
    count = raw.rindex((2).to_bytes(8, "little"))
    for size, reason in (1, "a: reaches beyond its storage"), (3, "beyond the end of the file"):
        path.write_bytes(raw[:count] + size.to_bytes(8, "little") + raw[count + 8 :])
        with pytest.raises(SourceError, match=reason):
            read_pickle_header(path)


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "x.bin"
    for content in (b"", b"P", pickle.dumps({"a": 1})):
        path.write_bytes(content)
        with pytest.raises(SourceError, match="no file of torch; download it again"):
            read_pickle_header(path)


# --- malformed ------------------------------------------------------------------------------------


def entry(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(f"x/{name}")


def rezip(
    path: Path, change: dict[str, bytes | None], compression: int = zipfile.ZIP_STORED
) -> Path:
    """The archive with some entries replaced, or removed (None), or all compressed."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    folder = next(iter(entries)).partition("/")[0]
    # torch computes where the storages of its own archives are; of others it looks
    entries |= {f"{folder}/.format_version": None, f"{folder}/.storage_alignment": None}
    entries |= {f"{folder}/{name}": content for name, content in change.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items():
            if content is not None:
                archive.writestr(name, content)
    return path


def forged(path: Path, is_zip: bool, *arguments: Any) -> Path:
    """A file of one tensor, whose view of its 4-element storage is as given: offset, shape,
    stride.
    """

    class Forged:
        def __reduce__(self) -> Any:
            storage = torch.storage.TypedStorage(
                wrap_storage=torch.ones(4).untyped_storage(), dtype=torch.float32
            )
            others = (False, collections.OrderedDict())
            return torch._utils._rebuild_tensor_v2, (storage, *arguments, *others)

    return save(path, {"a": Forged()}, is_zip)


@FORMATS
@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize(
    "view",
    [
        (0, (5,), (1,)), (2, (3,), (1,)), (0, (2, 2), (3, 1)), (-1, (2,), (1,)),
        (0, (2, 2), (1,)), (0, ("2",), (1,)), (0, (2**60, 2**60), (1, 1)),
    ],
    ids=["long", "offset", "stride", "before", "ranks", "string", "huge"],
)  # fmt: skip
def test_a_view_that_its_storage_does_not_hold(tmp_path: Path, is_zip: bool, view: tuple[Any, ...]):
    with pytest.raises(SourceError, match=r"^.*x\.bin: .*$"):
        read_pickle_header(forged(tmp_path / "x.bin", is_zip, *view))


@FORMATS
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_the_forged_view_is_read_when_it_fits(tmp_path: Path, is_zip: bool):
    [tensor] = read_pickle_header(forged(tmp_path / "x.bin", is_zip, 1, (3,), (1,)))
    assert load(tensor).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "compression", "reason"),
    [
        ({"data/0": None}, zipfile.ZIP_STORED, "file not found"),
        ({"data/0": b"short"}, zipfile.ZIP_STORED, "a: reaches beyond its storage"),
        ({"data.pkl": None}, zipfile.ZIP_STORED, r"x\.bin: "),
        ({"byteorder": b"big"}, zipfile.ZIP_STORED, "big-endian"),
        ({}, zipfile.ZIP_DEFLATED, "is compressed"),
        ({"data.pkl": b"no pickle"}, zipfile.ZIP_STORED, "Unsupported operand"),
        ({"data.pkl": b""}, zipfile.ZIP_STORED, r"x\.bin: "),
    ],
    ids=["no-data", "short", "no-pickle", "big", "compressed", "text", "empty"],
)
def test_malformed_archives(
    tmp_path: Path, change: dict[str, bytes | None], compression: int, reason: str
):
    path = rezip(save(tmp_path / "x.bin", {"a": torch.ones(8)}), change, compression)
    with pytest.raises(SourceError, match=reason):
        read_pickle_header(path)


def test_an_archive_that_another_program_packed_is_read(tmp_path: Path):
    path = rezip(save(tmp_path / "x.bin", {"b": torch.ones(8), "a": torch.zeros(3)}), {})
    check_against_torch(path)


def test_storages_that_are_not_where_torch_computes_are_refused(tmp_path: Path):
    path = save(tmp_path / "x.bin", {"a": torch.ones(8), "b": torch.zeros(8)})
    version, alignment = entry(path, ".format_version"), entry(path, ".storage_alignment")
    rezip(path, {".format_version": version, ".storage_alignment": alignment})
    with pytest.raises(SourceError, match="b: reaches beyond its storage"):
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
def sound(is_zip: bool) -> bytes:
    buffer = io.BytesIO()
    state = {"a": torch.ones(8), "b": torch.ones(4, 4).t()}
    torch.save(state, buffer, _use_new_zipfile_serialization=is_zip)
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
    raw = bytearray(sound(is_zip))
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


@FORMATS
def test_a_few_bytes_do_not_become_gigabytes(tmp_path: Path, is_zip: bool):
    path = save(tmp_path / "x.bin", {"a": torch.ones(1).expand(2**15, 2**15)}, is_zip)
    assert path.stat().st_size < 4000
    with pytest.raises(SourceError, match=r"a: .* of 1 values, more than the file holds"):
        read_pickle_header(path)


def test_torch_warns_of_nothing(tmp_path: Path):
    path = save(tmp_path / "x.bin", {"a": torch.ones(1)}, pickle_protocol=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_pickle_header(path)
