"""Finds the GPUs of this host that a run is spread over, and the cores beside each."""

from dataclasses import dataclass

from nf4conv.errors import PlanError
from nf4conv.run.device.on_driver.driver import bus_id, device_count
from nf4conv.system.machine import cores_beside, usable_cores


@dataclass(frozen=True)
class Place:
    """Names a device and the cores that feed it."""

    device: str
    cores: frozenset[int]


def find_places(device: str) -> list[Place]:
    """Returns the devices that are asked for, each with an even share of the cores beside it.

    Args:
        device: "cuda:all"; a list such as "cuda:0,cuda:1"; or "cpu,cpu", which means two
            processes on half of the cores each.

    Raises:
        PlanError: this machine does not have these devices.
    """
    gpus = [f"cuda:{number}" for number in range(device_count())]
    devices = gpus if device == "cuda:all" else device.split(",")
    if set(devices) != {"cpu"}:
        _require_gpus(devices, gpus, device)
    near = [_cores_beside(name) for name in devices]
    places = []
    for index, name in enumerate(devices):
        cores = near[index]
        # devices beside the same cores take every n-th of them
        turn = near[:index].count(cores)
        share = sorted(cores)[turn :: near.count(cores)]
        places.append(Place(name, frozenset(share) or cores))
    return places


def _require_gpus(devices: list[str], gpus: list[str], asked: str) -> None:
    are_different = len(set(devices)) == len(devices)
    if not devices or not are_different or not set(devices) <= set(gpus):
        raise PlanError(
            f"--device {asked}: expected GPUs of this machine, each once: {gpus or 'it has none'}"
        )


def _cores_beside(device: str) -> frozenset[int]:
    """Returns the cores of a GPU's NUMA node that this process may use.

    Where Linux does not tell them, all that the process may use.
    """
    usable = usable_cores()
    number = device.partition(":")[2]
    if not number:  # "cpu"
        return usable
    return usable & cores_beside(bus_id(int(number))) or usable
