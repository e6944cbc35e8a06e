"""Trains in one process, and in two among which FSDP2 shards the model."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard

Train = Callable[[Path, str, int, int], list[float]]
"""Trains on a checkpoint, on a device, as one of several processes: its number, then how many."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def shard(model: Any) -> None:
    """Shards a model of PEFT, layer by layer."""
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def losses_alone_and_together(
    train: Train, folder: Path, device: str = "cpu"
) -> tuple[list[float], list[float]]:
    """Returns the losses of one process, then those of two."""
    threads = torch.get_num_threads()
    # this process is the first of the two: the other one takes seconds to import transformers
    second = torch.multiprocessing.spawn(_second_of_two, (train, folder, device), join=False)
    alone = _losses_of(0, 1, train, folder, device)
    together = _losses_of(0, 2, train, folder, device)
    second.join()
    torch.set_num_threads(threads)
    return alone, together


def _second_of_two(_: int, train: Train, folder: Path, device: str) -> None:
    _losses_of(1, 2, train, folder, device)


def _losses_of(rank: int, processes: int, train: Train, folder: Path, device: str) -> list[float]:
    torch.set_num_threads(1)
    place = device
    if device == "cuda":
        place = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        BACKENDS[device],
        # processes meet at a file, since a free port may be taken meanwhile
        init_method=f"file://{folder}/processes-{processes}",
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(minutes=10),
    )
    losses = train(folder, place, rank, processes)
    torch.distributed.destroy_process_group()
    return losses
