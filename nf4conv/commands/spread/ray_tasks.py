"""Makes parts in tasks of a Ray cluster."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from nf4conv.commands.spread.part import Made, PartWork, make_part
from nf4conv.errors import Nf4convError, PlanError
from nf4conv.options import RunOptions
from nf4conv.system.signals import restore_stop_handler, stop_handler

_MOST_CORES: Final = 8  # of a task: more gain nothing
_PARTS_PER_TASK: Final = 4  # so that a slower host carries out fewer


@dataclass(frozen=True)
class RayCrew:
    """Has tasks of Ray make parts."""

    parts: int
    run: RunOptions
    task: Any  # remote function of Ray's

    def submit(self, work: PartWork) -> "Future[Made]":
        """Has a task make a part."""
        future: Future[Made] = self.task.remote(work).future()
        return future


@contextmanager
def open_ray(run: RunOptions) -> Iterator[RayCrew]:
    """Opens the cluster that RAY_ADDRESS names, or else one on this machine.

    The cluster on this machine ends with this process. Each task takes one GPU, or up to eight
    cores where there is none.

    Raises:
        PlanError: Ray is not installed, or no host of the cluster has such a device.
        Nf4convError: Ray failed.
    """
    try:
        import ray
    except ImportError as error:
        raise PlanError("--ray needs one more package: pip install 'nf4conv[ray]'") from error
    stopping = stop_handler()
    with redirect_stdout(sys.stderr):  # what Ray has to say is no result
        try:
            ray.init(log_to_driver=False, configure_logging=False)
            with suppress(ValueError):  # this is not the main thread
                restore_stop_handler(stopping)  # Ray's own answer is a page of its stack
            hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            yield _crew_of(ray, hosts, run)
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise Nf4convError(f"Ray: {str(error).strip().splitlines()[0]}") from error
        finally:
            ray.shutdown()


def _crew_of(ray: Any, hosts: list[dict[str, float]], run: RunOptions) -> RayCrew:
    """Chooses what each task takes, given the resources of all hosts."""
    has_gpus = any("GPU" in host for host in hosts)
    device = "cuda" if has_gpus and run.device != "cpu" else "cpu"
    kind = "GPU" if device == "cuda" else "CPU"
    hosts = [host for host in hosts if host.get(kind, 0) >= 1]
    if not hosts or run.device not in ("auto", device):
        raise PlanError(f"--ray --device {run.device}: no host of the cluster has such a device")
    cores = _MOST_CORES
    for host in hosts:
        cores = min(cores, int(host.get("CPU", 0) // host.get("GPU", 1)))
    cores = max(1, cores)
    fitting = 0
    for host in hosts:
        fitting += int(host[kind] // (cores if device == "cpu" else 1))
    task = ray.remote(num_cpus=cores, num_gpus=int(device == "cuda"))(make_part)
    each = replace(run, ray=False, device=device, workers=run.workers or cores)
    return RayCrew(_PARTS_PER_TASK * fitting, each, task)
