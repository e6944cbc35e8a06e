"""Shows the loop with a tiny mixture: pack, load, train three steps, merge, load the merge.

    python docs/experts_demo.py [PYTHON_WITH_TRANSFORMERS_4]

Run it where nf4conv, transformers, accelerate, bitsandbytes, peft and trl are installed. With the
Python of an environment that has transformers 4, it then does the same with a 4-bit checkpoint
that transformers 4 saved. docs/experts.md quotes what it prints.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

MAKE = """
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
torch.manual_seed(0)
config = Qwen3MoeConfig(vocab_size=320, hidden_size=128, intermediate_size=128,
    moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, num_experts=8, num_experts_per_tok=2)
Qwen3MoeForCausalLM(config).bfloat16().save_pretrained("mixture")
"""

MAKE_IN_4_BITS = """
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained("mixture", quantization_config=packed)
model.save_pretrained("mixture-nf4")
"""

TRAIN = """
import torch
from datasets import Dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
from words import tokenizer
model = AutoModelForCausalLM.from_pretrained("mixture-nf4", dtype=torch.bfloat16)
print(model.model.layers[0].mlp.experts.gate_up_proj)
config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
text = Dataset.from_list([{"text": " ".join(f"w{i}" for i in range(n, n + 20))} for n in range(8)])
arguments = SFTConfig("run", max_steps=3, per_device_train_batch_size=4, learning_rate=0.01,
    logging_steps=1, use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True)
trainer = SFTTrainer(prepare_model_for_kbit_training(model), arguments, train_dataset=text,
    peft_config=config, processing_class=tokenizer)
trainer.train()
print("losses:", [round(entry["loss"], 3) for entry in trainer.state.log_history[:3]])
trainer.save_model("adapter")
trained = trainer.model.eval()(torch.arange(20)[None]).logits
torch.save(trained.detach(), "trained.pt")
"""

LOAD = """
import torch
from transformers import AutoModelForCausalLM
merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32).eval()
print(type(merged.model.layers[0].mlp.experts.gate_up_proj).__name__, merged.dtype)
with torch.no_grad():
    found = merged(torch.arange(20)[None]).logits
trained = torch.load("trained.pt").float()
print("cosine with the trained model:", round(float(torch.cosine_similarity(
    found.flatten(), trained.flatten(), dim=0)), 5))
"""

WORDS = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = {f"w{i}": i for i in range(318)} | {"<pad>": 318, "<eos>": 319}
made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
"""


def run(title: str, command: list[str], folder: Path) -> None:
    """Runs a command and prints what it says, without the lines of libraries about themselves."""
    print(f"$ {title}", flush=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}")
    said = [line for line in done.stderr.splitlines() if line.startswith("nf4conv ")]
    for line in said + done.stdout.splitlines():
        if not line.startswith(("{'loss'", "{'train_runtime'")):
            print(line, flush=True)


def loop(folder: Path, *, quantizes: bool) -> None:
    """Runs the steps after the mixture is there."""
    python = [sys.executable, "-W", "ignore", "-c"]
    nf4conv = [sys.executable, "-m", "nf4conv"]
    (folder / "words.py").write_text(WORDS)
    if quantizes:
        command = ["quantize", "mixture", "mixture-nf4", "--quiet"]
        run("nf4conv quantize mixture mixture-nf4", nf4conv + command, folder)
    run(
        "python train.py      # SFTTrainer, three steps; nothing imported", [*python, TRAIN], folder
    )
    merge = ["dequantize", "mixture-nf4", "merged", "--lora", "adapter", "--quiet"]
    run("nf4conv dequantize mixture-nf4 merged --lora adapter", nf4conv + merge, folder)
    run("python load.py       # the merge, in plain transformers", [*python, LOAD], folder)


def main(python_with_transformers_4: str | None) -> None:
    """Runs the loop, and again with what transformers 4 saved."""
    with tempfile.TemporaryDirectory() as folder:
        run("python make.py", [sys.executable, "-W", "ignore", "-c", MAKE], Path(folder))
        loop(Path(folder), quantizes=True)
    if python_with_transformers_4 is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        python = [python_with_transformers_4, "-W", "ignore", "-c"]
        run("python make.py       # transformers 4.57", [*python, MAKE], Path(folder))
        run("python save.py       # load_in_4bit, save", [*python, MAKE_IN_4_BITS], Path(folder))
        loop(Path(folder), quantizes=False)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
