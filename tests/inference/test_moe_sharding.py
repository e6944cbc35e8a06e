"""Trains LoRA on packed experts with two processes: FSDP2 shards the experts, DDP does not. Other
ways are refused.
"""

import datetime
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed
from expert_training import adapt, load_mixture, make_mixture, packed_experts, prepare, train
from test_fsdp import meeting_place
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import DTensor

from nf4conv.errors import PlanError
from nf4conv.inference.moe.tensor import Experts4bit

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # of PEFT about models made of random numbers
]


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def losses_of(rank: int, processes: int, folder: Path, device: str, way: str = "fsdp") -> None:
    """Trains a few steps, as one of several processes. The first writes the losses."""
    torch.set_num_threads(1)
    place = device
    if device == "cuda":
        place = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        BACKENDS[device],
        init_method=meeting_place(folder, processes),
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(minutes=10),
    )
    mixture = load_mixture(folder, device_map={"": place})
    model = adapt(prepare(mixture, kbit=False, checkpointing=True)).bfloat16()
    whole = {name: weight.weight.parts[0].codes for name, weight in packed_experts(model).items()}
    if processes > 1 and way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif processes > 1:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        for name, part in model.named_parameters():
            if name in whole:
                assert isinstance(part, DTensor)
                own = part.to_local()
                assert isinstance(own, Experts4bit)
                expected = whole[name].chunk(processes)[rank]
                assert torch.equal(own.weight.parts[0].codes, expected)
    losses, _ = train(model, steps=4)
    if rank == 0:
        torch.save(losses, folder / f"losses-{processes}")
    torch.distributed.destroy_process_group()


def second_of_two(_: int, folder: Path, device: str, way: str) -> None:
    losses_of(1, 2, folder, device, way)


def losses_alone_and_together(
    folder: Path, device: str, way: str
) -> tuple[list[float], list[float]]:
    """Returns the losses of one process, then those of two."""
    threads = torch.get_num_threads()
    # this process is the first of the two: the other one takes seconds to import transformers
    second = torch.multiprocessing.spawn(second_of_two, (folder, device, way), join=False)
    losses_of(0, 1, folder, device)
    losses_of(0, 2, folder, device, way)
    second.join()
    torch.set_num_threads(threads)
    alone, together = (torch.load(folder / f"losses-{processes}") for processes in (1, 2))
    return alone, together


@pytest.mark.parametrize(
    ("kind", "moe"),
    [
        ("qwen3_moe", "packed"),
        pytest.param("GptOssForCausalLM", "stacked", marks=pytest.mark.architectures),
    ],
)
def test_fsdp_shards_packed_experts_and_trains_as_one_process_does(kind, moe, tmp_path):
    folder = make_mixture(kind, tmp_path, moe, quant_storage="bfloat16")
    alone, together = losses_alone_and_together(folder, "cpu", "fsdp")
    assert together == alone
    assert alone[-1] < alone[0] - 0.2


def test_ddp_trains_as_one_process_does(tmp_path):
    folder = make_mixture("qwen3_moe", tmp_path)
    alone, together = losses_alone_and_together(folder, "cpu", "ddp")
    assert together == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0] - 0.2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")
@pytest.mark.parametrize(
    ("way", "kind", "moe"),
    [
        ("fsdp", "qwen3_moe", "packed"),
        ("fsdp", "GptOssForCausalLM", "stacked"),
        ("ddp", "qwen3_moe", "packed"),
    ],
)
def test_two_gpus_train_as_one_does(way, kind, moe, tmp_path):
    folder = make_mixture(kind, tmp_path, moe, quant_storage="bfloat16")
    alone, together = losses_alone_and_together(folder, "cuda", way)
    assert together == pytest.approx(alone, rel=1e-2)
    assert alone[-1] < alone[0] - 0.2


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """The packed experts of a layer: four of them."""
    model = load_mixture(make_mixture("qwen3_moe", tmp_path_factory.mktemp("mixture")))
    return next(iter(packed_experts(model).values()))


@pytest.mark.parametrize("processes", [3, 5])
def test_a_number_of_processes_that_does_not_divide_the_experts_is_refused(experts, processes):
    with pytest.raises(PlanError, match="FSDP2 shards them over a number of processes that"):
        _chunk_with_empty(experts, processes, dim=0)


def test_flattening_is_refused(experts):
    """FSDP1 and DeepSpeed flatten a parameter, then cut it."""
    flat = experts.view(-1)
    assert flat.shape == (experts.numel(),)
    with pytest.raises(PlanError, match=r"use FSDP2 \(torch's fully_shard"):
        flat[:100]
    with pytest.raises(PlanError, match="cannot be flattened"):
        torch.cat([experts.flatten(), experts.flatten()])


def test_deepspeed_is_refused(experts, monkeypatch):
    """It moves a model whose parameters it has taken weak references to; torch stops there."""
    reference = weakref.ref(experts)
    module = torch.nn.Module()
    module.weight = experts
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    with pytest.raises(PlanError, match="DeepSpeed cannot hold 4-bit experts"):
        module.to("cpu")
    assert reference() is experts
