"""GGUF files as sources: every command takes them, and what is wrong with one is said in a line.

test_gguf_sources.py compares with llama.cpp's converter, test_ggml.py with its decoder.
"""

import json
import re
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import done, run
from comparing import compared
from fuzz_gguf import FILES
from gguf_files import LLAMA, SHAPES, text, write_gguf
from hub_server import Hub, Repo
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import nf4conv
from nf4conv.codec.decode.ggml import decode_ggml
from nf4conv.errors import SourceError
from nf4conv.sources.gguf import tokenizing
from nf4conv.sources.gguf.header import counts_of, read_gguf_header, shortest
from nf4conv.sources.opening import open_source

TYPES = {
    "blk.0.attn_q.weight": "Q4_K",
    "blk.0.ffn_gate.weight": "Q6_K",
    "blk.0.ffn_up.weight": "Q8_0",
    "token_embd.weight": "Q4_0",
}


def raw(path: Path, name: str) -> torch.Tensor:
    """The bytes of a tensor, a row for each row."""
    [tensor] = [one for one in read_gguf_header(path)[1] if one.name == name]
    content = path.read_bytes()[tensor.start : tensor.start + tensor.nbytes]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(tensor.shape[0], -1)


def test_dequantize_writes_what_transformers_loads(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", types=TYPES)
    done("dequantize", path, tmp_path / "out", "--dtype", "fp32", "--device", "cpu")
    found = load_file(tmp_path / "out" / "model.safetensors")
    queries = decode_ggml(raw(path, "blk.0.attn_q.weight"), "Q4_K", torch.float32)
    rows = queries.view(4, 32, 2, 256).transpose(1, 2).reshape(256, 256)  # by heads
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], rows)
    gate = decode_ggml(raw(path, "blk.0.ffn_gate.weight"), "Q6_K", torch.float32)
    assert torch.equal(found["model.layers.0.mlp.gate_proj.weight"], gate)
    norm = raw(path, "output_norm.weight").view(torch.float32).view(-1)
    assert torch.equal(found["model.norm.weight"], norm)
    assert len(found) == len(SHAPES)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert model.config.num_key_value_heads == 2
    assert model.config.rms_norm_eps == 1e-5
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, rows)


def test_the_logits_are_those_of_transformers_own_loading(tmp_path: Path):
    types = {**TYPES, "blk.0.ffn_down.weight": "IQ4_XS"}
    path = write_gguf(tmp_path / "model.gguf", {**LLAMA, "llama.vocab_size": 64}, types)
    done("dequantize", path, tmp_path / "out", "--dtype", "fp32", "--device", "cpu")
    logits = []
    for folder, name in ((tmp_path, "model.gguf"), (tmp_path / "out", None)):
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(torch.arange(3, 40).view(1, -1)).logits)
    assert torch.equal(*logits)


def test_every_command_takes_it(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", types=TYPES)
    out = tmp_path / "out"
    assert "GGUF" in done("inspect", path).stdout
    assert "Q4_K" in done("quantize", path, out, "--dry-run", "--json").stdout
    result = done("quantize", path, out, "--verify", "--device", "cpu")
    assert "1 of Q4_K" in result.output
    record = json.loads((out / "nf4conv.json").read_text())
    assert "GGUF Q4_K" in json.dumps(record)
    assert "1 weights in GGUF Q4&#95;K" in (out / "README.md").read_text()
    assert "GGUF BF16" not in (out / "README.md").read_text()
    done("verify", out, "--source", path, "--exact", "--device", "cpu")
    assert "already complete" in done("quantize", path, out, "--device", "cpu").output
    done("dequantize", path, tmp_path / "back", "--device", "cpu")
    done("verify", tmp_path / "back", "--source", path, "--device", "cpu")
    # parts make the bytes of one run
    for part in ("1/2", "2/2"):
        small = ("--max-shard-size", "300KB", "--device", "cpu", "--part", part)
        done("quantize", path, tmp_path / "parts", *small)
    done("verify", tmp_path / "parts", "--source", path, "--exact", "--device", "cpu")


def test_values_are_decoded_once_whatever_the_pieces(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", types=TYPES)
    for name, size in (("small", 64_000), ("large", 64_000_000)):
        nf4conv.quantize(path, tmp_path / name, buffer_size=size, device="cpu", workers=2)
    assert (tmp_path / "small" / "model.safetensors").read_bytes() == (
        tmp_path / "large" / "model.safetensors"
    ).read_bytes()


def test_config_and_tokenizer_of_the_original(tmp_path: Path):
    original = tmp_path / "original"
    original.mkdir()
    config = {"model_type": "mistral", "dtype": "float16", "hidden_size": 256}
    (original / "config.json").write_text(json.dumps(config))
    (original / "tokenizer.json").write_text("{}")
    path = write_gguf(tmp_path / "model.gguf", default="Q8_0")
    done("dequantize", path, tmp_path / "out", "--config-from", original, "--device", "cpu")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {values.dtype for values in found.values()} == {torch.float16}
    config["model_type"] = "qwen2"
    (original / "config.json").write_text(json.dumps(config))
    result = run("inspect", path, "--config-from", original)
    assert result.exit_code == 2
    assert "is a llama, but --config-from names a qwen2" in result.stderr


SPELLED = {
    **LLAMA,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


def test_a_tokenizer_is_made_into_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Looking makes none. What needs one without OUT has it in a folder that is removed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    path = write_gguf(tmp_path / "model.gguf", SPELLED)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "tokenizer_json", lambda _: pytest.fail("is not needed"))
        done("inspect", path)
        done("dequantize", path, out, "--device", "cpu", "--dry-run")
    result = done("dequantize", path, out, "--device", "cpu")
    assert "config.json and the tokenizer are made of the file's metadata" in result.output
    assert json.loads((out / "tokenizer.json").read_bytes())["model"]["merges"] == [["a", "b"]]
    assert (out / "tokenizer_config.json").is_file()
    assert "complete" in done("dequantize", path, out, "--device", "cpu").output
    source = open_source(path)
    assert not source.folder.exists()
    with source.whole_folder() as folder:
        assert folder.is_relative_to(tmp_path / "temporary")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (folder / name).read_bytes() == (out / name).read_bytes()
    done("quantize", path, tmp_path / "nf4", "--device", "cpu")
    (tmp_path / "nf4" / "tokenizer.json").write_text("{}")
    words = ("--source", path, "--exact", "--device", "cpu")
    damaged = run("verify", tmp_path / "nf4", *words)
    assert damaged.exit_code == 1
    assert "tokenizer.json" in damaged.output
    assert not list((tmp_path / "temporary").iterdir())


def test_a_folder_beside_the_file_with_its_name_is_not_its_own(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    path = write_gguf(tmp_path / "model.gguf")
    done("dequantize", path, tmp_path / "out", "--device", "cpu")
    assert not (tmp_path / "out" / "notes.txt").exists()


def write_split(folder: Path, numbers: tuple[int, int], **metadata: object) -> Path:
    """A model in two files, which carry these numbers in their names."""
    names = list(SHAPES)
    for place, part in enumerate((names[:5], names[5:])):
        described = {"split.no": place, "split.count": 2, "split.tensors.count": len(SHAPES)}
        if place == 0:
            described = {**LLAMA, **described, **metadata}
        shapes = {name: SHAPES[name] for name in part}
        write_gguf(folder / f"m-0000{numbers[place]}-of-00002.gguf", described, shapes=shapes)
    return folder / "m-00001-of-00002.gguf"


def test_split_files(tmp_path: Path):
    first = write_split(tmp_path, (1, 2))
    second = tmp_path / "m-00002-of-00002.gguf"
    for path in (first, second):
        source = open_source(path)
        assert (len(source.tensors), len(source.files)) == (len(SHAPES), 2)
    first.unlink()
    with pytest.raises(SourceError, match=r"m-00001-of-00002.gguf: is missing"):
        open_source(second)
    assert "is part 1 of 2 files of a model, and not the first" in refused(
        write_split(tmp_path, (2, 1))
    )
    for count in ("2", [2, 2], 2.5):
        path = write_split(tmp_path, (1, 2), **{"split.count": count})
        assert "their names end with -00001-of-NNNNN.gguf" in refused(path)


def test_a_card_beside_the_file(tmp_path: Path):
    """Licence and originals of the card in the folder."""
    write_gguf(tmp_path / "m.gguf", LLAMA, default="Q4_0")
    card = "---\nlicense: apache-2.0\nbase_model: org/sixteen\n---\n# A model\n"
    (tmp_path / "README.md").write_text(card)
    made = made_card(tmp_path / "m.gguf", tmp_path / "out")
    assert "license: apache-2.0\n" in made


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=str)
def test_the_card_of_a_repository(hub: Hub, tmp_path: Path, options: tuple[str, ...]):
    content = write_gguf(tmp_path / "m.gguf", default="Q4_0").read_bytes()
    card = b"---\nlicense: mit\nbase_model: org/sixteen\n---\n"
    hub.repos["me/models"] = Repo()
    hub.repos["me/models"].commit({"README.md": card, "Q4_0/m.gguf": content})
    place = ("--gguf-file", "m.gguf", "--subfolder", "Q4_0", "--cache-dir", tmp_path / "hub")
    made = made_card("me/models", tmp_path / "out", *place, *options)
    assert "license: mit\n" in made


def made_card(source: object, out: Path, *options: object) -> str:
    done("quantize", source, out, "--device", "cpu", *options)
    return (out / "README.md").read_text()


def test_evaluate_says_what_to_give_instead(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf")
    done("dequantize", tmp_path / "m.gguf", tmp_path / "out", "--device", "cpu")
    said = run("evaluate", tmp_path / "out", "--source", tmp_path / "m.gguf", "--device", "cpu")
    assert said.exit_code == 2
    assert "m.gguf: evaluate runs no GGUF file and no adapter" in said.output


def test_experts_come_one_by_one(tmp_path: Path):
    metadata = {**LLAMA, "llama.expert_count": 3, "llama.expert_used_count": 2}
    shapes = {name: shape for name, shape in SHAPES.items() if "ffn_g" not in name}
    shapes = {name: shape for name, shape in shapes.items() if "ffn_up" not in name}
    shapes |= {
        "blk.0.ffn_gate_inp.weight": (3, 256),
        "blk.0.ffn_gate_exps.weight": (3, 512, 256),
        "blk.0.ffn_up_exps.weight": (3, 512, 256),
        "blk.0.ffn_down_exps.weight": (3, 256, 512),
    }
    del shapes["blk.0.ffn_down.weight"]
    path = write_gguf(
        tmp_path / "model.gguf", metadata, {"blk.0.ffn_up_exps.weight": "Q4_K"}, shapes
    )
    done("dequantize", path, tmp_path / "out", "--dtype", "fp32", "--device", "cpu")
    found = load_file(tmp_path / "out" / "model.safetensors")
    stack = raw(path, "blk.0.ffn_up_exps.weight").view(3, 512, -1)
    third = decode_ggml(stack[2].contiguous(), "Q4_K", torch.float32)
    assert torch.equal(found["model.layers.0.block_sparse_moe.experts.2.w3.weight"], third)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "mixtral"
    assert config["num_local_experts"] == 3


def test_experts_and_parts_that_do_not_fit(tmp_path: Path):
    metadata, shapes = FILES["mixtral"]
    claimed = {"blk.0.ffn_gate_exps.weight": (2**33, 0, 256)}
    path = write_gguf(tmp_path / "model.gguf", metadata, shapes=shapes, claimed=claimed)
    assert "blk.0.ffn_gate_exps.weight: is of shape [8589934592, 0, 256]" in refused(path)
    metadata, shapes = FILES["deepseek2"]
    less = {name: shape for name, shape in shapes.items() if "attn_v_b" not in name}
    path = write_gguf(tmp_path / "model.gguf", metadata, shapes=less)
    assert "attn_k_b.weight: goes with blk.0.attn_v_b.weight, which is missing" in refused(path)
    for sizes, said in (
        ((2, 32, 64), "does not go with the others of its layer"),
        ((4, 32, 32), "does not go with the others of its layer"),
    ):
        other = {**shapes, "blk.0.attn_v_b.weight": sizes}
        path = write_gguf(tmp_path / "model.gguf", metadata, shapes=other)
        assert said in refused(path)
    metadata, shapes = FILES["qwen35"]
    other_heads = {**metadata, "qwen35.ssm.time_step_rank": 3}
    path = write_gguf(tmp_path / "model.gguf", other_heads, shapes=shapes)
    assert "does not go with the others of its layer, or with the metadata" in refused(path)
    without = {key: found for key, found in metadata.items() if "group_count" not in key}
    path = write_gguf(tmp_path / "model.gguf", without, shapes=shapes)
    assert "needs ssm.group_count, which the metadata does not say" in refused(path)


@pytest.mark.parametrize("name", FILES)
def test_every_command_takes_tensors_that_are_put_together(tmp_path: Path, name: str):
    """Whole and by small pieces: the same bytes, and 4 bits that verify against the source."""
    metadata, shapes = FILES[name]
    types = {"blk.0.ffn_up_exps.weight": "Q8_0", "blk.0.attn_k_b.weight": "Q8_0"}
    path = write_gguf(tmp_path / "model.gguf", metadata, types, shapes)
    for size in ("64KB", "64MB"):
        count = 64_000 if size == "64KB" else 64_000_000
        nf4conv.dequantize(path, tmp_path / size, buffer_size=count, device="cpu")
        nf4conv.quantize(
            path, tmp_path / f"nf4-{size}", verify=True, buffer_size=count, device="cpu"
        )
    small, large = (tmp_path / size / "model.safetensors" for size in ("64KB", "64MB"))
    assert small.read_bytes() == large.read_bytes()
    nf4 = tmp_path / "nf4-64KB"
    done("verify", nf4, "--source", path, "--exact", "--device", "cpu")
    same = (nf4 / "model.safetensors").read_bytes()
    assert same == (tmp_path / "nf4-64MB" / "model.safetensors").read_bytes()
    done("quantize", tmp_path / "64MB", tmp_path / "again", "--device", "cpu")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == same
    assert "GGUF" in done("inspect", path).output
    done("verify", tmp_path / "64MB", "--source", path, "--device", "cpu")


@pytest.mark.parametrize("spelling", ["file", "address", "folder"])
def test_a_file_in_a_repository_or_folder(hub: Hub, tmp_path: Path, spelling: str):
    content = write_gguf(tmp_path / "model-Q4.gguf").read_bytes()
    files = {"gguf/model-Q4.gguf": content, "gguf/model-Q8.gguf": b"another"}
    hub.repos["me/models"] = Repo()
    hub.repos["me/models"].commit(files)
    hub.repos["me/original"] = Repo()
    hub.repos["me/original"].commit(
        {
            "config.json": b'{"model_type": "llama", "dtype": "bfloat16"}',
            "model.safetensors": b"not fetched",
            "tokenizer.json": b"{}",
        }
    )
    arguments: list[object] = ["me/models", "--gguf-file", "model-Q4.gguf", "--subfolder", "gguf"]
    if spelling == "address":
        arguments = [f"{hub.url}/me/models/blob/main/gguf/model-Q4.gguf"]
    if spelling == "folder":
        arguments = [tmp_path, "--gguf-file", "model-Q4.gguf"]
    common = ("--config-from", "me/original", "--cache-dir", tmp_path / "hub", "--device", "cpu")
    source, *options = arguments
    done("dequantize", source, tmp_path / "out", *options, *common)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(SHAPES)
    assert hub.count("model-Q8.gguf") == 0
    assert hub.count("original/resolve/.*safetensors") == 0


LONG = {**LLAMA, "tokenizer.ggml.tokens": [f"token {number}" for number in range(100_000)]}


def ranges_of(hub: Hub, name: str) -> list[tuple[int, int]]:
    """The ranges that were asked for, of a file from which nothing else was read."""
    asked = []
    for request in hub.requests:
        if re.search(f"(GET|HEAD) .*/{name}", request.line) or request.range:
            assert request.range is not None, request.line
            first, last = request.range.removeprefix("bytes=").split("-")
            asked.append((int(first), int(last) + 1))
    return asked


@pytest.mark.parametrize("command", ["inspect", "quantize"])
def test_headers_are_read_by_ranges(hub: Hub, tmp_path: Path, command: str):
    """Of a file on the Hub, one that is described is not downloaded."""
    content = write_gguf(tmp_path / "model.gguf", LONG, default="F32").read_bytes()
    hub.repos["me/models"] = Repo()
    hub.repos["me/models"].commit({"README.md": b"# Mine", "model.gguf": content + bytes(2**23)})
    words: list[object] = [
        "me/models",
        "--gguf-file",
        "model.gguf",
        "--cache-dir",
        tmp_path / "hub",
    ]
    if command == "quantize":
        words += [tmp_path / "out", "--dry-run", "--stream"]
        words.insert(1, words.pop(-3))
    assert "self_attn.q_proj" in done(command, *words, "--json").stdout
    asked = set(ranges_of(hub, "model.gguf"))  # by two addresses each, of the Hub and of its store
    assert asked == {(0, 2**20), (2**20, 3 * 2**20)}
    assert not list((tmp_path / "hub").rglob("*.gguf"))


def test_streaming_keeps_no_copy(hub: Hub, tmp_path: Path):
    """One file, and a split one whose files come one after the other: the same bytes."""
    names = list(SHAPES)
    files = {"whole.gguf": write_gguf(tmp_path / "whole.gguf", types=TYPES).read_bytes()}
    for number, part in ((1, names[:5]), (2, names[5:9]), (3, names[9:])):
        metadata = {**LLAMA, "split.count": 3, "split.tensors.count": len(SHAPES)}
        shapes = {name: SHAPES[name] for name in part}
        name = f"m-0000{number}-of-00003.gguf"
        files[name] = write_gguf(tmp_path / name, metadata, TYPES, shapes).read_bytes()
    hub.repos["me/models"] = Repo()
    hub.repos["me/models"].commit({"README.md": b"# Mine", **files})
    cache = ("--cache-dir", tmp_path / "hub", "--device", "cpu", "--max-shard-size", "500KB")
    for name in ("whole.gguf", "m-00001-of-00003.gguf"):
        out = tmp_path / f"streamed-{name}"
        done("dequantize", "me/models", out, "--gguf-file", name, "--stream", *cache)
        done("dequantize", tmp_path / name, tmp_path / f"local-{name}", *cache)
        assert not compared(tmp_path / f"local-{name}", out).unlike
        shards = sorted(path.name for path in out.glob("*.safetensors"))
        assert len(shards) > 2
        for shard in shards:
            expected = (tmp_path / f"local-{name}" / shard).read_bytes()
            assert (out / shard).read_bytes() == expected
    assert not list((tmp_path / "hub").rglob("*.gguf"))
    assert not list(tmp_path.glob("streamed-*/**/*.gguf"))


def test_files_that_are_wrong_on_the_hub(hub: Hub, tmp_path: Path):
    content = write_gguf(tmp_path / "model.gguf", LONG).read_bytes()
    hub.repos["me/models"] = Repo()
    files = {"README.md": b"# Mine", "model.gguf": content[:1_500_000], "notes.gguf": b"GGUF"}
    hub.repos["me/models"].commit(files)
    for name, said in (
        ("model.gguf", "is cut off in its header"),
        ("notes.gguf", "is cut off"),
        ("b.gguf", "me/models: has no b.gguf; its GGUF files: model.gguf, notes.gguf"),
        (None, "it has GGUF files: name one, --gguf-file NAME"),
    ):
        words = () if name is None else ("--gguf-file", name)
        result = run("inspect", "me/models", *words, "--cache-dir", tmp_path / "hub")
        assert result.exit_code == 2
        *_, last = result.stderr.splitlines()
        assert last.startswith("Error: ")
        assert said in last


# --- what is wrong --------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(SourceError) as raised:
        open_source(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 2000
    return message


LAST_TYPE = len(text("output.weight")) + 4 + 16  # bytes from the name in a record to its type

DAMAGED = [
    (0, b"GGML", "is no GGUF file"),
    (4, struct.pack("<I", 1), "version 1; 2 and 3 in little-endian order are read"),
    (8, struct.pack("<Q", 10**9), "claims 1,000,000,000 tensors, as no model has"),
    (24, struct.pack("<Q", 2**40), "is cut off in its header"),
    (24, struct.pack("<Q", 2**23), "is cut off in its header"),
    (52, struct.pack("<I", 99), "a value of type 99, which is not read"),
    ("type", struct.pack("<I", 41), "output.weight: is of type 41, which nf4conv does not decode"),
    ("type", struct.pack("<I", 12), "250 values are no whole number of blocks of Q4_K"),
]


def test_damaged_files_are_refused(tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", shapes={**SHAPES, "output.weight": (64, 250)})
    good = path.read_bytes()
    for place, content, said in DAMAGED:
        whole = bytearray(good)
        if isinstance(place, str):
            place = good.index(text("output.weight")) + LAST_TYPE
        whole[place : place + len(content)] = content
        path.write_bytes(whole)
        assert said in refused(path)
    for length in (0, 3, 4, 10, 24, 100, 1000):
        path.write_bytes(good[:length])
        assert "the download is incomplete" in refused(path)
    path.write_bytes(good[:-1000])
    assert "output.weight: reaches beyond the end of the file" in refused(path)


MISFITS: list[tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = [
    ({"general.architecture": "wavtokenizer-dec"}, {}, "the architecture 'wavtokenizer-dec'"),
    ({"general.architecture": "x" * 10**6}, {}, "GGUF of the architecture 'xxx"),
    ({"general.architecture": None}, {}, "GGUF of the architecture 'None'"),
    ({"general.architecture": "clip"}, {}, "reads towers from the original's safetensors"),
    ({"general.alignment": 0}, {}, "has an alignment of 0"),
    ({"general.alignment": "x" * 10**6}, {}, "has an alignment of 'xxx"),
    ({"split.count": 3}, {}, "is part 0 of 3 files of a model"),
    ({"split.tensors.count": 7}, {}, "7 tensors are announced, 12 are there"),
    ({"llama.attention.head_count": 5, "llama.attention.head_count_kv": 5}, {}, "5 heads"),
    ({"general.architecture": "bert"}, {}, "a bert, of which the metadata does not say all"),
    ({}, {"blk.0.attn_sinks.weight": (4,)}, "attn_sinks.weight: has no name in LlamaForCausalLM"),
]


def test_metadata_and_tensors_that_do_not_fit_are_refused(tmp_path: Path):
    for changes, shapes, said in MISFITS:
        metadata = {key: found for key, found in (LLAMA | changes).items() if found is not None}
        path = write_gguf(tmp_path / "model.gguf", metadata, shapes=SHAPES | shapes)
        assert said in refused(path)


def test_counts_are_whole_numbers():
    assert counts_of({"heads": [4, 0]}, "heads") == [4, 0]
    for heads in ([True, True], [4, -1], [4.0], 4, None):
        assert counts_of({"heads": heads}, "heads") == []


def test_a_tower_beside_a_text_model_is_noted(tmp_path: Path):
    (tmp_path / "mmproj-model.gguf").write_bytes(b"GGUF")
    notes = open_source(write_gguf(tmp_path / "model.gguf")).notes
    assert any("the text model alone: the tower that sees" in note for note in notes)


def test_the_largest_numbers_come_into_the_config(tmp_path: Path):
    """Some decimals with fewer digits are too large for float32."""
    [largest] = struct.unpack("<f", b"\xff\xff\x7f\x7f")
    changed = {"llama.rope.freq_base": largest, "llama.attention.layer_norm_rms_epsilon": 0.1}
    source = open_source(write_gguf(tmp_path / "model.gguf", {**LLAMA, **changed}))
    assert source.config is not None
    assert struct.pack("<f", source.config["rope_theta"]) == b"\xff\xff\x7f\x7f"
    assert source.config["rms_norm_eps"] == 0.1
    assert shortest(10 * largest) == 10 * largest


def test_the_source_is_never_cleared(tmp_path: Path):
    """OUT that holds the file, and --overwrite."""
    path = write_gguf(tmp_path / "model.gguf")
    result = run("dequantize", path, tmp_path, "--overwrite", "--device", "cpu")
    assert result.exit_code == 2, result.output
    assert path.exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    path = tmp_path / "gone.gguf"
    with pytest.raises(SourceError, match=re.escape(str(path))):
        read_gguf_header(path)
