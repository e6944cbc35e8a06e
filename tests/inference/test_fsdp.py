"""Trains QLoRA on a checkpoint with floats as storage, which FSDP2 shards over two processes.

The losses are those of one process, and they fall.
"""

from pathlib import Path

import pytest
import torch
from adapters import INPUT, load, make_model
from peft import LoraConfig, get_peft_model
from sharded import losses_alone_and_together, shard
from torch.distributed.tensor import DTensor

import nf4conv

pytestmark = pytest.mark.oracle


def train(folder: Path, place: str, _: int, processes: int) -> list[float]:
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    model = get_peft_model(load(folder, device_map=place, dtype=torch.bfloat16), config).bfloat16()
    if processes > 1:
        shard(model)
        for name, part in model.named_parameters():
            if name.endswith("up_proj.base_layer.weight"):
                assert isinstance(part, DTensor)
                assert len(part.to_local()) == len(part) // processes
    trained = [part for part in model.parameters() if part.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(INPUT, labels=INPUT).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_fsdp_shards_the_packed_bytes_and_trains_as_one_process_does(tmp_path):
    base = make_model(tmp_path / "base", "llama", torch.bfloat16)
    options = {"quant_storage": "bfloat16"}
    nf4conv.quantize(base, tmp_path / "fsdp", **options, device="cpu")
    alone, together = losses_alone_and_together(train, tmp_path / "fsdp")
    assert together == pytest.approx(alone, rel=1e-3)
    assert alone[-1] < alone[0] - 0.2
