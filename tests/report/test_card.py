"""The model card: what the Hub reads in it, and what people do."""

import json
from pathlib import Path

import pytest
import yaml
from checkpoints import contents, write_source
from hub_server import Hub, Repo

import nf4conv
from nf4conv.report.loading import loading_of

CPU = {"device": "cpu"}
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
    where = {"cache_dir": tmp_path / "cache"}
    nf4conv.quantize(REPO, tmp_path / "out", quant_type="fp4", **CPU, **where)
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
    assert f"(https://huggingface.co/{REPO}) at commit [" in body
    assert f"https://huggingface.co/{REPO}/tree/{commit}" in body
    assert "| 4-bit data type | FP4 |" in body
    assert f"--source {REPO}" in body
    assert "AutoModelForCausalLM" in body


def test_sizes_are_those_on_disk(source: Path, tmp_path: Path):
    report = nf4conv.quantize(source, tmp_path / "out", max_shard_size=60_000, **CPU)
    _, body = parts(tmp_path / "out")
    on_disk = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert (
        f"{report.totals.bytes_before / 1e6:,.2f} MB → {on_disk / 1e6:,.2f} MB, "
        f"{report.totals.bits_per_parameter:.2f} bits" in body
    )
    assert f"{report.totals.packed} weights" in body


@pytest.mark.parametrize(
    "card",
    [
        "",
        "---\n",
        "---\n{: broken\n---\n",
        "---\nlicense: {a: mapping}\nlanguage: 7\ntags: one\n---\n",
        "---\n"
        + "".join(
            f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12)
        )
        + "---\n",
        "---\ntags: !!python/object/apply:os.system ['true']\n---\n",
    ],
    ids=["empty", "unfinished", "broken", "other-types", "bomb", "object"],
)
def test_any_card_of_the_source_is_survived(source: Path, tmp_path: Path, card: str):
    (source / "README.md").write_text(card)
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    front, _ = parts(tmp_path / "out")
    assert front["library_name"] == "transformers"
    assert {"bitsandbytes", "4-bit", "nf4", "nf4conv"} <= set(front["tags"])
    assert "license" not in front


def named(tmp_path: Path, config: dict[str, str], **options: str) -> tuple[dict[str, object], str]:
    """The card of a model on this disk."""
    tmp_path.mkdir(exist_ok=True)
    source = write_source(tmp_path / "my-model")
    described = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(described | config))
    (source / "README.md").write_text(CARD)
    nf4conv.quantize(source, tmp_path / "out", **options, **CPU)
    return parts(tmp_path / "out")


def test_a_folder_is_called_by_its_own_name_and_never_by_its_path(tmp_path: Path):
    front, body = named(tmp_path, {"_name_or_path": str(tmp_path / "my-model")})
    assert "base_model" not in front
    assert body.lstrip().startswith("# my-model in 4 bits\n")
    assert str(tmp_path) not in body


def test_the_config_or_the_user_says_what_the_original_is(tmp_path: Path):
    front, body = named(tmp_path, {"_name_or_path": "some-org/Original"})
    assert front["base_model"] == "some-org/Original"
    assert body.lstrip().startswith("# Original in 4 bits\n")
    assert "--source some-org/Original" in body
    again, _ = named(
        tmp_path / "again", {"_name_or_path": "some-org/Original"}, base_model="me/Mine"
    )
    assert again["base_model"] == "me/Mine"


def test_the_author_s_text_is_kept_below_ours(tmp_path: Path):
    _, body = named(tmp_path, {})
    ours, _, theirs = body.partition("\n---\n")
    assert "nf4conv verify" in ours
    assert theirs.strip() == "# Some Model"


def test_what_only_trainers_need_is_not_copied(source: Path, tmp_path: Path):
    """The scheduler/ of a pipeline is, see test_diffusers.py."""
    leftovers = {
        "trainer_state.json",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "training_args.bin",
    }
    for name in leftovers:
        (source / name).write_bytes(b"x")
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    assert "tokenizer.json" in contents(tmp_path / "out")
    assert not leftovers & contents(tmp_path / "out").keys()


@pytest.mark.parametrize(
    ("config", "files", "code"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, (), 'AutoModelForCausalLM.from_pretrained("X", '
                                                      'dtype="auto", device_map="auto")'),
        ({"architectures": ["GPT2LMHeadModel"]}, (), 'AutoModelForCausalLM.from_pretrained("X", '
                                                     'dtype="auto", device_map="auto")'),
        ({"architectures": ["BertModel"]}, ("modules.json",),
         'SentenceTransformer("X", model_kwargs={"dtype": "auto"})'),
        ({"architectures": ["BertModel"]}, (),
         'AutoModel.from_pretrained("X", dtype="auto", device_map="auto")'),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, (),
            'AutoModelForSeq2SeqLM.from_pretrained("X", dtype="auto", device_map="auto")',
        ),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, (),
            'AutoModelForImageTextToText.from_pretrained("X", dtype="auto", device_map="auto")',
        ),
        (
            {"_class_name": "FluxTransformer2DModel"}, (),
            'FluxTransformer2DModel.from_pretrained("X", torch_dtype=torch.bfloat16)',
        ),
        ({"architectures": ["x; import os"]}, (), None),
    ],
    ids=["causal", "gpt2", "sentences", "plain", "seq2seq", "vision", "denoiser", "hostile"],
)  # fmt: skip
def test_how_to_load(config: dict[str, object], files: tuple[str, ...], code: str | None):
    loading = loading_of(config, files, "bfloat16")
    assert (None if loading is None else loading.call("X").removeprefix("model = ")) == code


# --- a card of ours as the source's ---------------------------------------------------------------


def anew(source: Path, out: Path, **options: object) -> tuple[dict[str, object], str]:
    nf4conv.quantize(source, out, **options, **CPU)
    return parts(out)


def test_our_section_of_an_earlier_card_is_replaced(tmp_path: Path):
    _, first = named(tmp_path, {"_name_or_path": "some-org/Original"})
    front, body = anew(tmp_path / "out", tmp_path / "again", quant_type="fp4")
    assert body.count("## Check") == first.count("## Check") == 1
    assert body.count(" in 4 bits\n") == 1
    assert "| 4-bit data type | FP4 |" in body
    assert "NF4 |" not in body
    assert body.partition("\n---\n")[2].strip() == "# Some Model"
    assert front["tags"] == ["chat", "bitsandbytes", "4-bit", "fp4", "nf4conv"]
    assert front["base_model"] == "some-org/Original"
    assert front["base_model_relation"] == "quantized"
    assert front["license"] == "llama3.1"
    assert front["pipeline_tag"] == "text-generation"
    assert front["library_name"] == "transformers"


def test_the_authors_may_write_about_4_bits_themselves(source: Path, tmp_path: Path):
    theirs = "# Our model in 4 bits\n\nWe like nf4conv, and other tools.\n\n---\n\nMore."
    (source / "README.md").write_text(theirs)
    _, body = anew(source, tmp_path / "out")
    assert body.rstrip().endswith(theirs)
