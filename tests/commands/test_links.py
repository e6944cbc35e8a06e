"""Links, special files and cards in a source that comes from a stranger: what is read of them,
copied, and said.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from checkpoints import contents, write_source
from four_bit import write as write_packed
from hostile import command, packed, refused, strict_and_in_no_time  # noqa: F401

import nf4conv

# --- links and special files ----------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("the password")
    return tmp_path / "secret"


@pytest.mark.parametrize("name", ["quantize", "dequantize"])
def test_a_link_that_leads_out_is_refused_by_name(tmp_path: Path, secret: Path, name: str):
    source = (
        write_packed(tmp_path / "source", packed())
        if name == "dequantize"
        else write_source(tmp_path / "source")
    )
    (source / "inside.txt").symlink_to(source / "config.json")
    (source / "additional_chat_templates").symlink_to(secret.parent)
    os.mkfifo(source / "pipe.txt")
    for stray, target in (("notes.txt", secret), ("environment.json", "/proc/self/environ")):
        (source / stray).symlink_to(target)
        for option in ("--dry-run", "--quiet"):
            line = refused(command(name, source, tmp_path / "out", option))
            assert line.startswith(f"{source / stray}: a link that leads out of {source}, to ")
            assert not (tmp_path / "out").exists()
        (source / stray).unlink()
    done = command(name, source, tmp_path / "out")
    assert done.exit_code == 0, done.output
    out = contents(tmp_path / "out")
    assert "pipe.txt" not in out
    assert out["inside.txt"] == (source / "config.json").read_bytes()
    assert not any(b"the password" in content for content in out.values())


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "hf_quant_config.json",
    ],
)
@pytest.mark.parametrize("command_name", ["quantize", "inspect"])
def test_a_config_or_weights_that_lead_out_are_refused_by_name(
    source: Path, tmp_path: Path, name: str, command_name: str
):
    if name == "hf_quant_config.json":
        (tmp_path / name).write_text("{}")
        if command_name == "inspect":
            pytest.skip("inspect does not read it")
    else:
        shutil.move(source / name, tmp_path / name)
    (source / name).symlink_to(tmp_path / name)
    arguments = [source] if command_name == "inspect" else [source, tmp_path / "out"]
    line = refused(command(command_name, *arguments))
    assert (
        line
        == f"{source / name}: a link that leads out of {source}, to {tmp_path / name}; put the "
        f"file itself there"
    )


def test_links_into_the_blobs_of_the_hub_s_cache_are_followed(tmp_path: Path):
    files = contents(write_source(tmp_path / "published"))
    repo = tmp_path / "hub/models--org--name"
    (repo / "blobs").mkdir(parents=True)
    # as huggingface-cli once made them
    for snapshot in (repo / "snapshots/0123", tmp_path / "a local folder"):
        snapshot.mkdir(parents=True)
        for number, (name, content) in enumerate(files.items()):
            (repo / f"blobs/{number}").write_bytes(content)
            (snapshot / name).symlink_to(repo / f"blobs/{number}")
        out = tmp_path / f"out of {snapshot.name}"
        assert command("quantize", snapshot, out).exit_code == 0
        assert contents(out)["tokenizer.json"] == files["tokenizer.json"]


def test_links_within_a_pipeline_are_followed_and_others_are_refused(tmp_path: Path, secret: Path):
    root = tmp_path / "pipeline"
    root.mkdir()
    write_source(root / "text_encoder")
    (root / "tokenizer").mkdir()
    (root / "tokenizer/vocab.json").write_text("{}")
    (root / "tokenizer/merges.txt").symlink_to(secret)
    (root / "shared.json").symlink_to(root / "tokenizer/vocab.json")
    shutil.move(root / "text_encoder/config.json", root / "own.json")
    (root / "text_encoder/config.json").symlink_to("../own.json")
    (root / "text_encoder/tokenizer.json").unlink()
    (root / "text_encoder/tokenizer.json").symlink_to(secret)
    parts = {
        "text_encoder": ["transformers", "LlamaModel"],
        "tokenizer": ["transformers", "LlamaTokenizer"],
    }
    (root / "model_index.json").write_text(json.dumps({"_class_name": "Pipeline", **parts}))
    for stray in ("tokenizer/merges.txt", "text_encoder/tokenizer.json"):
        line = refused(command("quantize", root, tmp_path / "out"))
        assert line.startswith(f"{root / stray}: a link that leads out of")
        (root / stray).unlink()
    done = command("quantize", root, tmp_path / "out")
    assert done.exit_code == 0, done.output
    out = contents(tmp_path / "out")
    assert {"tokenizer/vocab.json", "shared.json", "text_encoder/config.json"} <= set(out)


# --- front matter ---------------------------------------------------------------------------------

BOMB = "---\n" + "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
) + "---\n"  # fmt: skip


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        (BOMB.encode(), "it has aliases"),
        (b"---\nlicense: " + b"[" * 50_000 + b"\n---\n", "recursion"),
        (
            b"---\nlicense: mit\n" + b"#\n" * 100_000 + b"---\n",
            "it does not end within 131,072 bytes",
        ),
        (b"---\nlicense: \xff\n---\n", "can't decode byte"),
        (b"---\n{: broken\n---\n", "expected"),
        ("link", "a link that leads out of"),
    ],
    ids=["merge keys", "deep", "long", "no text", "broken", "link"],
)
def test_front_matter_that_cannot_be_read_is_said_before_the_work(
    source: Path, tmp_path: Path, card: bytes | str, reason: str
):
    if isinstance(card, str):
        (tmp_path / "card").write_text("---\nlicense: mit\n---\n")
        (source / "README.md").symlink_to(tmp_path / "card")
    else:
        (source / "README.md").write_bytes(card)
    [note] = nf4conv.plan_quantize(source).made.notes
    assert note.startswith(
        "README.md: its front matter cannot be read, so the new card ignores it: "
    )
    assert reason in note
    assert "\n" not in note
    assert command("quantize", source, tmp_path / "out").exit_code == 0
    assert "license" not in (tmp_path / "out/README.md").read_text()


def test_a_source_that_is_a_stranger_s_tree_of_links_ends(source: Path, tmp_path: Path):
    (source / "loop.json").symlink_to("loop.json")
    (source / "up").symlink_to("..")
    (source / "dangling.txt").symlink_to("nowhere")
    assert command("quantize", source, tmp_path / "out").exit_code == 0
    assert not {"loop.json", "dangling.txt", "up"} & {
        path.name for path in (tmp_path / "out").iterdir()
    }
