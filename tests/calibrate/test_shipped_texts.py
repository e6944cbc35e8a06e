"""The texts that `--calibrate default` reads: small enough to ship, large enough to calibrate."""

import json
from pathlib import Path

import nf4conv

TEXTS = Path(nf4conv.__file__).parent / "calibrate" / "texts"
FILES = sorted(TEXTS.glob("*.jsonl"))


def words_of(line: str) -> str:
    """Returns all text of a line, and checks its form."""
    record = json.loads(line)
    if set(record) == {"text"}:
        return record["text"]
    assert set(record) == {"messages"}
    roles = [message["role"] for message in record["messages"]]
    # no system: the templates of some models refuse it
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert roles
    return "\n".join(message["content"] for message in record["messages"])


def test_size():
    assert sum(path.stat().st_size for path in TEXTS.iterdir()) <= 300_000
    assert len(FILES) == 6
    # 65,536 tokens of four bytes
    sizes = [len("".join(map(words_of, read(path))).encode()) for path in FILES]
    assert sum(sizes) >= 262_144
    # each file gives as many tokens as another
    assert min(sizes) > sum(sizes) / len(sizes) * 0.75


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_every_line_is_text_that_appears_once():
    seen = set()
    for path in FILES:
        for line in read(path):
            words = words_of(line)
            assert len(words) > 150, words
            assert not (set(words) & {"\r", "\0", "\ufffd", "\ufeff"})
            assert words not in seen
            seen.add(words)


def test_the_readme_names_every_file():
    readme = (TEXTS / "README.md").read_text(encoding="utf-8")
    for path in FILES:
        assert path.name in readme
