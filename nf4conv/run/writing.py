"""Opens the devices that make shards, and divides shards into tasks."""

from nf4conv.options import RunOptions
from nf4conv.plan.jobs import Plan
from nf4conv.run.device.choice import Devices, open_devices
from nf4conv.run.shards import ShardProgress, ShardTask
from nf4conv.run.tasks.shard import shard_tasks


def writing_devices(output: Plan, run: RunOptions) -> Devices:
    """Opens the devices that make the shards of a plan.

    Raises:
        PlanError: there is no such device as the user named.
    """
    devices = open_devices(lambda: output.jobs, output.format, run, is_measured=run.verify)
    _ = devices.name  # which finds the device, or says that there is none
    return devices


def writing_tasks(progress: ShardProgress, devices: Devices, piece: int) -> list[ShardTask]:
    """Returns the tasks that make a shard, given how many bytes a worker reads at a time."""
    tasks = shard_tasks(progress, progress.shard.jobs, devices, piece)
    progress.expect(len(tasks))
    return tasks
