"""Trains LoRA on packed experts with two processes: FSDP2 shards the experts."""

from pathlib import Path

import pytest
import torch
from expert_training import adapt, load_mixture, make_mixture, packed_experts, prepare, train
from sharded import losses_alone_and_together, shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import DTensor

from nf4conv.errors import PlanError
from nf4conv.inference.moe.tensor import Experts4bit

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),  # of PEFT about models made of random numbers
]


def train_experts(folder: Path, place: str, rank: int, processes: int) -> list[float]:
    mixture = load_mixture(folder, device_map={"": place})
    model = adapt(prepare(mixture, kbit=False, checkpointing=True)).bfloat16()
    whole = {name: weight.weight.parts[0].codes for name, weight in packed_experts(model).items()}
    if processes > 1:
        shard(model)
        for name, part in model.named_parameters():
            if name in whole:
                assert isinstance(part, DTensor)
                own = part.to_local()
                assert isinstance(own, Experts4bit)
                expected = whole[name].chunk(processes)[rank]
                assert torch.equal(own.weight.parts[0].codes, expected)
    return train(model, steps=4)[0]


KINDS = ["qwen3_moe", "GptOssForCausalLM"]


@pytest.mark.parametrize(
    "kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.architectures)]
)
def test_fsdp_shards_packed_experts_and_trains_as_one_process_does(kind, tmp_path):
    folder = make_mixture(kind, tmp_path, "packed", quant_storage="bfloat16")
    alone, together = losses_alone_and_together(train_experts, folder)
    assert together == alone
    assert alone[-1] < alone[0] - 0.2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_train_as_one_does(kind, tmp_path):
    folder = make_mixture(kind, tmp_path, "packed", quant_storage="bfloat16")
    alone, together = losses_alone_and_together(train_experts, folder, "cuda")
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
