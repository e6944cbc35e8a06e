"""Trains packed experts with TRL. `make test-others` installs TRL and runs this."""

import pytest
import torch
from expert_training import (
    TARGETS,
    decode_experts,
    load_mixture,
    make_mixture,
    packed_experts,
    prepare,
)
from peft import LoraConfig

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # of TRL about models made of random numbers
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_mixture("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def words():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {f"w{i}": i for i in range(94)} | {"<pad>": 94, "<eos>": 95}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def test_the_trainer_of_trl(mixture, tmp_path):
    arguments = trl.SFTConfig(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_length=16,
    )
    lines = [" ".join(f"w{i % 94}" for i in range(n, n + 12)) for n in range(8)]
    found = []
    for is_decoded in (False, True):
        model = prepare(load_mixture(mixture), True, False)
        if is_decoded:
            decode_experts(model)
        torch.manual_seed(2)
        trainer = trl.SFTTrainer(
            model,
            arguments,
            train_dataset=datasets.Dataset.from_list([{"text": line} for line in lines]),
            processing_class=words(),
            peft_config=LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **TARGETS),
        )
        assert bool(packed_experts(trainer.model)) != is_decoded
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], rel=1e-3)
