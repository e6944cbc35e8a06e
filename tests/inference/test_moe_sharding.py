"""Trains LoRA on packed experts with two processes: FSDP2 shards the experts."""

import datetime
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


def losses_of(rank: int, processes: int, folder: Path, device: str) -> None:
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
    if processes > 1:
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


def second_of_two(_: int, folder: Path, device: str) -> None:
    losses_of(1, 2, folder, device)


def losses_alone_and_together(folder: Path, device: str) -> tuple[list[float], list[float]]:
    """Returns the losses of one process, then those of two."""
    threads = torch.get_num_threads()
    # this process is the first of the two: the other one takes seconds to import transformers
    second = torch.multiprocessing.spawn(second_of_two, (folder, device), join=False)
    losses_of(0, 1, folder, device)
    losses_of(0, 2, folder, device)
    second.join()
    torch.set_num_threads(threads)
    alone, together = (torch.load(folder / f"losses-{processes}") for processes in (1, 2))
    return alone, together


@pytest.mark.parametrize(
    ("kind", "moe"),
    [
        ("qwen3_moe", "packed"),
        pytest.param("GptOssForCausalLM", "packed", marks=pytest.mark.architectures),
    ],
)
def test_fsdp_shards_packed_experts_and_trains_as_one_process_does(kind, moe, tmp_path):
    folder = make_mixture(kind, tmp_path, moe, quant_storage="bfloat16")
    alone, together = losses_alone_and_together(folder, "cpu")
    assert together == alone
    assert alone[-1] < alone[0] - 0.2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")
@pytest.mark.parametrize(
    ("kind", "moe"), [("qwen3_moe", "packed"), ("GptOssForCausalLM", "packed")]
)
def test_two_gpus_train_as_one_does(kind, moe, tmp_path):
    folder = make_mixture(kind, tmp_path, moe, quant_storage="bfloat16")
    alone, together = losses_alone_and_together(folder, "cuda")
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


def test_flattening_decodes_nothing(experts):
    """FSDP2 asks for the flat parameter, and does nothing with it."""
    flat = experts.view(-1)
    assert flat.shape == (experts.numel(),)
    assert flat.device.type == "meta"
