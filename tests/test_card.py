"""The model card: what the Hub reads in it, and what people do."""

from pathlib import Path

import pytest
import yaml
from checkpoints import contents, write_source
from hub_server import Hub, Repo

from nf4conv import QuantizeOptions, RunOptions, quantize_checkpoint
from nf4conv.options import SourceOptions

CPU = RunOptions(device="cpu")
REPO = "some-org/Some-Model_1.0"
CARD = """---
license: llama3.1
language: [en, de]
pipeline_tag: text-generation
library_name: transformers
tags: [chat, bitsandbytes]
extra_gated_prompt: nothing of ours
model-index: [{name: x, results: []}]
---
# Some Model
"""


def parts(out: Path) -> tuple[dict[str, object], str]:
    """Front matter and body."""
    _, front, body = (out / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_of_a_model_on_the_hub(hub: Hub, tmp_path: Path):
    files = contents(write_source(tmp_path / "published")) | {"README.md": CARD.encode()}
    hub.repos[REPO] = Repo()
    commit = hub.repos[REPO].commit(files)
    where = SourceOptions(cache_dir=tmp_path / "cache")
    quantize_checkpoint(REPO, tmp_path / "out", QuantizeOptions(quant_type="fp4"), CPU, where=where)
    front, body = parts(tmp_path / "out")
    assert front == {
        "base_model": REPO,
        "base_model_relation": "quantized",
        "license": "llama3.1",
        "language": ["en", "de"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["chat", "bitsandbytes", "4-bit", "fp4", "nf4conv"],
    }
    assert f"https://huggingface.co/{REPO}/tree/{commit}" in body
    assert "| 4-bit data type | FP4 |" in body
    assert f"--source {REPO}" in body
    assert "AutoModelForCausalLM" in body


def test_sizes_are_those_on_disk(tmp_path: Path):
    source = write_source(tmp_path / "source")
    report = quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(max_shard_size=60_000), CPU)
    _, body = parts(tmp_path / "out")
    on_disk = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert (
        f"{report.bytes_before / 1e6:,.2f} MB → {on_disk / 1e6:,.2f} MB, {report.bits_per_parameter:.2f} bits" in body
    )
    assert f"{report.packed} weights" in body


@pytest.mark.parametrize(
    "card",
    [
        "",
        "# no front matter",
        "---\n",
        "---\n- a list\n---\n",
        "---\n{: broken\n---\n",
        "---\nlicense: {a: mapping}\nlanguage: 7\ntags: one\n---\n",
        "---\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12))
        + "---\n",
        "---\ntags: !!python/object/apply:os.system ['true']\n---\n",
    ],
    ids=["empty", "plain", "unfinished", "list", "broken", "other-types", "bomb", "object"],
)
def test_any_card_of_the_source_is_survived(tmp_path: Path, card: str):
    source = write_source(tmp_path / "source")
    (source / "README.md").write_text(card)
    quantize_checkpoint(source, tmp_path / "out", None, CPU)
    front, _ = parts(tmp_path / "out")
    assert front["library_name"] == "transformers"
    assert {"bitsandbytes", "4-bit", "nf4", "nf4conv"} <= set(front["tags"])
    assert "license" not in front


def test_an_interrupted_run_writes_the_same_card(tmp_path: Path):
    source = write_source(tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "once", None, CPU)
    quantize_checkpoint(source, tmp_path / "again", None, RunOptions(device="cpu", workers=3, buffer_size=1))
    assert (tmp_path / "once/README.md").read_bytes() == (tmp_path / "again/README.md").read_bytes()
