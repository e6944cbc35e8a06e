"""4-bit → trained → merged → GGUF: llama.cpp's converter takes what `dequantize --lora` writes
(`make test-others`).
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from adapters import LINEAR, load, make_model, merged_by_peft, train
from gguf_families import CONVERTER, NEEDS_CONVERTER
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import nf4conv

pytestmark = NEEDS_CONVERTER
CPU = {"device": "cpu"}


def write_tokenizer(folder: Path) -> None:
    """One as Llama 2 has it, whose kind the converter knows by its structure."""
    tokens = {
        token: number
        for number, token in enumerate(["<unk>", "<s>", "</s>", *map(chr, range(33, 126))])
    }
    tokenizer = Tokenizer(models.BPE(tokens, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def converted(folder: Path) -> dict[str, np.ndarray]:
    from gguf import GGUFReader

    out = folder.with_suffix(".gguf")
    subprocess.run(
        [sys.executable, CONVERTER, folder, "--outfile", out, "--outtype", "f32"], check=True
    )
    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(out).tensors}


def test_what_was_trained_on_4_bits_becomes_a_gguf(tmp_path):
    base = make_model(tmp_path / "base", "llama")
    write_tokenizer(base)
    nf4conv.quantize(base, tmp_path / "nf4", **CPU)
    train(
        load(tmp_path / "nf4", device_map="cpu"),
        tmp_path / "adapter",
        target_modules=LINEAR["llama"],
    )
    lora = {"lora": (str(tmp_path / "adapter"),)}
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "merged", **lora, **CPU)
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "decoded", **CPU)
    merged_by_peft(load(tmp_path / "decoded"), tmp_path / "adapter").save_pretrained(
        tmp_path / "by_peft"
    )
    write_tokenizer(tmp_path / "by_peft")
    ours, theirs = converted(tmp_path / "merged"), converted(tmp_path / "by_peft")
    assert ours.keys() == theirs.keys()
    assert "blk.1.ffn_down.weight" in ours
    for name, values in theirs.items():
        assert np.abs(ours[name] - values).max() <= 2**-21 * np.abs(values).max(), name
    plain = converted(tmp_path / "decoded")
    assert any(not np.array_equal(ours[name], values) for name, values in plain.items())
