"""Kimi K2 comes back from GGUF: DeepSeek-V3's layers, YaRN, and a tokenizer of tiktoken.

Hugging Face → llama.cpp's converter → Hugging Face (`make test-others`).
"""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from gguf_families import CONVERTER, FAMILIES, NEEDS_CONVERTER, write_model
from safetensors.torch import load_file
from tokenizers import Regex, pre_tokenizers

import nf4conv

pytestmark = NEEDS_CONVERTER
CPU = {"device": "cpu"}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KIMI_K2 = {
    **FAMILIES["DeepseekV3ForCausalLM"],
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "rope_parameters": YARN,
    "max_position_embeddings": 512,
    "vocab_size": 320,
}

# what the converter takes of tokenization_kimi.py: ranks of byte strings, and special tokens
_TOKENIZER = """
import json
from pathlib import Path
from types import SimpleNamespace
from transformers import PreTrainedTokenizer

class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **words):
        ranks = json.loads(Path(vocab_file).read_text())
        self.ranks = {bytes.fromhex(token): rank for token, rank in ranks.items()}
        self.model = SimpleNamespace(_mergeable_ranks=self.ranks)
        self.special_tokens = {"[BOS]": len(ranks), "[EOS]": len(ranks) + 1}
        super().__init__(**words)

    @property
    def vocab_size(self):
        return len(self.ranks) + 2

    def get_vocab(self):
        return {**{token.decode("latin-1"): rank for token, rank in self.ranks.items()},
                **self.special_tokens}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.special_tokens.get(token, 0)

    def _convert_id_to_token(self, number):
        return "?"
"""

_CONFIGURATION = """
import transformers

class DeepseekV3Config(transformers.DeepseekV3Config):
    model_type = "kimi_k2"
"""

TEXTS = [
    "The quick brown fox's 12345 jumps, over   the lazy dog!\n\n  Ends\there.",
    "naïve café – 你好世界, мир 😀",
    "HTTPServer's 汉字English汉字, I'LL",
]


def parts_of(word: bytes, ranks: dict[bytes, int], below: int | None = None) -> list[bytes]:
    """What tiktoken makes of a word: the pair of the lowest rank is merged first."""
    parts = [word[place : place + 1] for place in range(len(word))]
    while True:
        pairs = [ranks.get(left + right) for left, right in pairwise(parts)]
        known = [rank for rank in pairs if rank is not None and (below is None or rank < below)]
        if not known:
            return parts
        place = pairs.index(min(known))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def make_ranks() -> dict[bytes, int]:
    """Bytes, and pieces of the texts: each is two pieces of lower rank."""
    ranks = {bytes([value]): value for value in range(256)}
    for text in TEXTS:
        content = text.encode()
        for place in range(len(content) - 1):
            parts = parts_of(content[place : place + 4], ranks)
            merged = parts[0] + parts[1] if len(parts) > 1 else parts[0]
            if merged not in ranks and len(ranks) < 310:
                ranks[merged] = len(ranks)
    return ranks


# as in tokenization_kimi.py of Kimi-K2-Instruct
_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def encoded_by_tiktoken(text: str, ranks: dict[bytes, int]) -> list[int]:
    cutting = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
    numbers = []
    for word, _ in cutting.pre_tokenize_str(text):
        numbers += [ranks[part] for part in parts_of(word.encode(), ranks)]
    return numbers


# Runs the converter; a small vocabulary has not the hash by which it knows that of Kimi K2.
_PROGRAM = """
import sys
from pathlib import Path
script, folder, out = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent))
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "kimi-k2"
import convert_hf_to_gguf
sys.argv = [script, folder, "--outfile", out, "--outtype", "bf16"]
convert_hf_to_gguf.main()
"""


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """A small Kimi K2 as on the Hub, its GGUF file, and its logits."""
    folder = tmp_path_factory.mktemp("kimi") / "source"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "DeepseekV3ForCausalLM", KIMI_K2)
        write_model(folder, "DeepseekV3ForCausalLM", torch.bfloat16)
    expected = logits_of(folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    ranks = {token.hex(): rank for token, rank in make_ranks().items()}
    (folder / "tiktoken.model").write_text(json.dumps(ranks))
    (folder / "tokenization_kimi.py").write_text(_TOKENIZER)
    (folder / "configuration_deepseek.py").write_text(_CONFIGURATION)
    classes = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    described = {"tokenizer_class": "TikTokenTokenizer", "auto_map": classes}
    described |= {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    written = json.loads((folder / "config.json").read_text())
    rope = {key: value for key, value in YARN.items() if key not in ("rope_theta", "rope_type")}
    written |= {"model_type": "kimi_k2", "rope_theta": 50000.0}
    written["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    written["rope_scaling"] = {**rope, "type": "yarn"}
    (folder / "config.json").write_text(json.dumps(written))
    out = folder.with_name("kimi.gguf")
    command = [sys.executable, "-c", _PROGRAM, str(CONVERTER), str(folder), str(out)]
    subprocess.run(command, check=True, env=os.environ)
    return folder, out, expected


def logits_of(folder: Path) -> torch.Tensor:
    kind = transformers.DeepseekV3ForCausalLM
    with torch.no_grad():
        model = kind.from_pretrained(folder, dtype=torch.float32)
        return model(torch.arange(3, 40).view(1, -1)).logits


def test_weights_come_back_with_the_config_of_the_original(
    tmp_path: Path, kimi: tuple[Path, Path, torch.Tensor]
):
    """The model type is kimi_k2 then, and not deepseek_v3."""
    source, path, _ = kimi
    where = {"config_from": str(source)}
    nf4conv.dequantize(path, tmp_path / "back", **CPU, **where)
    expected = load_file(source / "model.safetensors")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == "kimi_k2"
    assert (tmp_path / "back" / "tiktoken.model").is_file()


def test_config_and_tokenizer_come_from_the_metadata(
    tmp_path: Path, kimi: tuple[Path, Path, torch.Tensor]
):
    """The logits are equal, so attention is scaled as YaRN does. Tokens are those of tiktoken."""
    _, path, expected = kimi
    nf4conv.dequantize(path, tmp_path / "alone", **CPU)
    assert torch.equal(logits_of(tmp_path / "alone"), expected)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "alone" / "tokenizer.json")
    )
    ranks = make_ranks()
    for text in TEXTS:
        numbers = made.encode(text, add_special_tokens=False)
        assert numbers == encoded_by_tiktoken(text, ranks)
        assert made.decode(numbers) == text
    assert made.encode("[EOS]", add_special_tokens=False) == [len(ranks) + 1]
