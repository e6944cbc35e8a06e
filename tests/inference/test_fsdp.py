"""Trains QLoRA on a checkpoint with floats as storage, which FSDP2 shards over two processes.

The losses are those of one process, and they fall.
"""

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed
from adapters import INPUT, load, make_model
from api import quantize_checkpoint
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nf4conv.options import QuantizeOptions, RunOptions

pytestmark = pytest.mark.oracle


def losses_of(rank: int, processes: int, folder: Path) -> None:
    """Trains a few steps, as one of several processes. The first writes the losses."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=meeting_place(folder, processes),
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(minutes=10),
    )
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    model = get_peft_model(load(folder, device_map="cpu", dtype=torch.bfloat16), config).bfloat16()
    if processes > 1:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
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
    if rank == 0:
        torch.save(losses, folder / f"losses-{processes}")
    torch.distributed.destroy_process_group()


def second_of_two(_: int, folder: Path) -> None:
    losses_of(1, 2, folder)


def meeting_place(folder: Path, processes: int) -> str:
    """Returns where processes find each other: a file, since a free port may be taken meanwhile."""
    return f"file://{folder}/processes-{processes}"


def test_fsdp_shards_the_packed_bytes_and_trains_as_one_process_does(tmp_path):
    base = make_model(tmp_path / "base", "llama", torch.bfloat16)
    options = QuantizeOptions(quant_storage="bfloat16")
    quantize_checkpoint(base, tmp_path / "fsdp", options, RunOptions(device="cpu"))
    threads = torch.get_num_threads()
    # this process is the first of the two: the other one takes seconds to import transformers
    second = torch.multiprocessing.spawn(second_of_two, (tmp_path / "fsdp",), join=False)
    losses_of(0, 1, tmp_path / "fsdp")
    losses_of(0, 2, tmp_path / "fsdp")
    second.join()
    torch.set_num_threads(threads)
    alone, together = (torch.load(tmp_path / f"fsdp/losses-{processes}") for processes in (1, 2))
    assert together == pytest.approx(alone, rel=1e-3)
    assert alone[-1] < alone[0] - 0.2
