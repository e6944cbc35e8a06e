"""The texts that `--calibrate default` reads: small enough to ship, large enough to calibrate."""

import json
from pathlib import Path

import nf4conv

TEXTS = Path(nf4conv.__file__).parent / "calibrate" / "texts"
FILES = sorted(TEXTS.glob("*.jsonl"))


def read(path: Path) -> list[str]:
    """Returns the text of each line, and checks the line's form."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if set(record) == {"text"}:
            found.append(record["text"])
            continue
        roles = [message["role"] for message in record["messages"]]
        # no system: the templates of some models refuse it
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        found.append("\n".join(message["content"] for message in record["messages"]))
    return found


def test_size():
    assert sum(path.stat().st_size for path in TEXTS.iterdir()) <= 300_000
    sizes = [len("".join(read(path)).encode()) for path in FILES]
    assert sum(sizes) >= 262_144  # 65,536 tokens of four bytes
    # each file gives as many tokens as another
    assert min(sizes) > sum(sizes) / len(sizes) * 0.75


def test_every_line_is_text_that_appears_once_and_the_readme_names_its_file():
    readme = (TEXTS / "README.md").read_text(encoding="utf-8")
    assert all(path.name in readme for path in FILES)
    texts = [text for path in FILES for text in read(path)]
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert len(text) > 150
        assert not (set(text) & {"\r", "\0", "\ufffd", "\ufeff"})
