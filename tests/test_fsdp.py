"""QLoRA of a checkpoint with floats as storage, sharded over two processes by FSDP2: as in one, and
its loss falls.
"""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed
from adapters import INPUT, load, make_model
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nf4conv.commands.quantize import quantize_checkpoint
from nf4conv.options import QuantizeOptions, RunOptions

pytestmark = pytest.mark.oracle


def losses_of(rank: int, processes: int, port: int, folder: Path) -> None:
    """Train a few steps; the first process writes the losses."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=processes)
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    model = get_peft_model(load(folder, device_map="cpu", dtype=torch.bfloat16), config).bfloat16()
    if processes > 1:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        packed = [
            part
            for name, part in model.named_parameters()
            if name.endswith("up_proj.base_layer.weight")
        ]
        assert all(
            isinstance(part, DTensor) and len(part.to_local()) == len(part) // processes
            for part in packed
        )
    optimizer = torch.optim.AdamW(
        [part for part in model.parameters() if part.requires_grad], lr=0.02
    )
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_fsdp_shards_the_packed_bytes_and_trains_as_one_process_does(tmp_path):
    base = make_model(tmp_path / "base", "llama", torch.bfloat16)
    options = QuantizeOptions(quant_storage="bfloat16")
    quantize_checkpoint(base, tmp_path / "fsdp", options, RunOptions(device="cpu"))
    threads = torch.get_num_threads()
    losses_of(0, 1, free_port(), tmp_path / "fsdp")
    torch.set_num_threads(threads)
    torch.multiprocessing.spawn(losses_of, (2, free_port(), tmp_path / "fsdp"), nprocs=2)
    alone, together = (torch.load(tmp_path / f"fsdp/losses-{processes}") for processes in (1, 2))
    assert together == pytest.approx(alone, rel=1e-3)
    assert alone[-1] < alone[0] - 0.2
