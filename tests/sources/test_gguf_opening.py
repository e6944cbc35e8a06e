"""Opening a GGUF file with a large vocabulary: where its strings end is remembered, and believed
only if the metadata is the same. tokenizer.json is what a library of JSON would write.
"""

import json
import struct
from pathlib import Path

import pytest
from gguf_files import LLAMA, write_gguf

from nf4conv.errors import SourceError
from nf4conv.sources.gguf import remembered
from nf4conv.sources.gguf.header import GgufHeader, read_gguf_header
from nf4conv.sources.gguf.incoming import HeaderBytes, Texts
from nf4conv.sources.gguf.tokenizing import read_vocabulary, tokenizer_json

TOKENS = [f"a rather long token {number}" for number in range(8000)]
MERGES = [f"a {number}" for number in range(4000)]
LARGE = {
    **LLAMA,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": MERGES,
    "general.name": "large",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nf4conv" / "gguf"


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many strings were gone through, for each array."""
    counts: list[int] = []
    genuine = HeaderBytes._find_end

    def counted(content: HeaderBytes, count: int) -> None:
        counts.append(count)
        genuine(content, count)

    monkeypatch.setattr(HeaderBytes, "_find_end", counted)
    return counts


def content_of(header: GgufHeader) -> object:
    """What a header says, with its strings."""
    metadata = {}
    for key, found in header.metadata.items():
        metadata[key] = list(found) if isinstance(found, Texts) else found
    return metadata, header.tensors, header.digest


def test_the_second_run_goes_through_no_strings(tmp_path: Path, cache: Path, walks: list[int]):
    path = write_gguf(tmp_path / "model.gguf", LARGE)
    first = content_of(read_gguf_header(path))
    assert walks == [8000, 4000]
    [file] = cache.iterdir()
    again = content_of(read_gguf_header(path))
    assert again == first
    assert walks == [8000, 4000]
    file.chmod(0o666)  # another user may have written it
    assert content_of(read_gguf_header(path)) == first
    assert walks == [8000, 4000] * 2


def test_small_files_leave_nothing(tmp_path: Path, cache: Path):
    read_gguf_header(write_gguf(tmp_path / "model.gguf"))
    assert not cache.exists()


def test_another_file_that_begins_alike(tmp_path: Path, walks: list[int]):
    """The first 64 KiB are the same. Strings behind them end at the same places, or elsewhere."""
    read_gguf_header(write_gguf(tmp_path / "first.gguf", LARGE))
    same_places = ["b" + MERGES[0][1:], *MERGES[1:]]
    for number, merges in enumerate((same_places, MERGES[::-1], [*MERGES, "a b"], MERGES[1:])):
        walks.clear()
        metadata = {**LARGE, "tokenizer.ggml.merges": merges}
        path = write_gguf(tmp_path / f"{number}.gguf", metadata)
        header = read_gguf_header(path)
        assert walks == [8000, len(merges)]
        assert list(header.metadata["tokenizer.ggml.merges"]) == merges
        assert header.metadata["general.name"] == "large"


WRONG_ENDS = (0, 2**40, 100_003)  # before the beginning, beyond the file, within a string


@pytest.mark.parametrize("end", WRONG_ENDS)
def test_wrong_ends_are_not_believed(tmp_path: Path, cache: Path, walks: list[int], end: int):
    path, first, file = remembered_file(tmp_path, cache)
    good = file.read_bytes()
    known = json.loads(good)
    file.write_text(json.dumps({**known, "ends": dict.fromkeys(known["ends"], end)}))
    assert content_of(read_gguf_header(path)) == first
    assert walks == [8000, 4000] * 2
    assert file.read_bytes() == good


@pytest.mark.parametrize(
    "content",
    [
        *("", "7", "[1]", "{", "[" * 9999, '{"ends": {}}', '{"digest": "", "ends": [1]}'),
        '{"digest": "", "ends": {"1": Infinity}}',
    ],
)
def test_what_is_not_remembered_is_found(tmp_path: Path, cache: Path, walks, content: str):
    path, first, file = remembered_file(tmp_path, cache)
    good = file.read_bytes()
    file.write_text(content)
    assert content_of(read_gguf_header(path)) == first
    assert walks == [8000, 4000] * 2
    assert file.read_bytes() == good


def remembered_file(folder: Path, cache: Path) -> tuple[Path, object, Path]:
    """A GGUF file that was read, what its header says, and the file of the cache."""
    path = write_gguf(folder / "model.gguf", LARGE)
    first = content_of(read_gguf_header(path))
    [file] = cache.iterdir()
    return path, first, file


def test_errors_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that was cut off since it was read."""
    path = write_gguf(tmp_path / "model.gguf", LARGE)
    whole = path.read_bytes()
    for size in (3, 60_000, 100_000, 300_000, len(whole) - 10):
        path.write_bytes(whole)
        read_gguf_header(path)
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError) as error:
            read_gguf_header(path)
        with monkeypatch.context() as patch:
            patch.setattr(remembered, "cache_folder", lambda: None)
            with pytest.raises(SourceError) as without:
                read_gguf_header(path)
        assert str(error.value) == str(without.value)


def test_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_gguf(tmp_path / "model.gguf", LARGE)
    monkeypatch.setattr(remembered, "cache_folder", lambda: None)
    assert read_gguf_header(path).metadata["general.name"] == "large"
    (tmp_path / "cache").write_bytes(b"no folder")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert read_gguf_header(path).metadata["general.name"] == "large"


def texts(strings: list[bytes]) -> Texts:
    content = b"".join(struct.pack("<Q", len(one)) + one for one in strings)
    return Texts(content, len(strings))


ODD = [
    "a b", 'say "it"', "a\\n b", "\\", "x\ny z", "\r\u2028 é", "a", "", " ", "a  b", "a b c",
    "😀 \x00",
]  # fmt: skip


def test_merges_are_written_as_a_library_of_json_writes_them():
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": texts([b"a"]),
        "tokenizer.ggml.merges": texts([merge.encode() for merge in ODD]),
    }
    vocabulary = read_vocabulary(metadata)
    assert vocabulary is not None
    made = b"".join(tokenizer_json(vocabulary))
    pairs = json.dumps([merge.split(" ") for merge in ODD])
    assert made.endswith(f', "vocab": {{"a": 0}}, "merges": {pairs}}}}}\n'.encode())


@pytest.mark.parametrize(
    ("tokens", "is_made"),
    [
        ([b"a", b"b", "é".encode()], True),
        ([b"a", b"b", b"a"], False),
        ([b"\xff", b"\xfe"], False),  # both are replaced by the same sign
        ([b"\xff", b"a\xfe"], True),
        (["é".encode()[:1], "é".encode()[1:]], False),  # a letter that two tokens share
        ([b"\xc3", b"\xa9 "], True),
    ],
)
def test_tokens_are_distinct_as_text(tokens: list[bytes], is_made: bool):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": texts(tokens),
        "tokenizer.ggml.merges": texts([]),
    }
    as_text = [token.decode(errors="replace") for token in tokens]
    assert is_made == (len(set(as_text)) == len(as_text))
    vocabulary = read_vocabulary(metadata)
    assert (vocabulary is not None) == is_made
    if vocabulary is not None:
        assert vocabulary.tokens == as_text
