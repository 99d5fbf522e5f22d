"""Where this machine runs the devices of a cluster: on GPUs or the CPU, with which backend and which memory meter."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.fake.target import follows_fake_streams
from pipefit.meter import MemoryMeter
from pipefit.meter.cpu import Meter
from pipefit.meter.cuda import CudaMeter
from pipefit.meter.kernels import Kernels
from pipefit.plans import Plan


def backend_of(plan: Plan) -> str:
    """The backend of `torch.distributed` for the workers of a plan.

    Raises:
        UsageError: the plan is for GPUs, and this machine has none.
    """
    if plan.cluster.backend != "cuda":
        return "gloo"
    if not torch.cuda.is_available():
        raise UsageError(
            f"the plan is for {plan.cluster.name}, and this machine has no GPU: pipefit certify needs none; to train "
            f"here, plan for emulated devices, such as emulated:{len(plan.stages)}x256MiB"
        )
    return "nccl"


def local_device(cluster: Cluster, number: int) -> torch.device:
    """Where this machine runs one of the cluster's devices: on its GPU of that number, or on the CPU.

    Raises:
        UsageError: it has no such GPU.
    """
    if cluster.backend != "cuda":
        return torch.device("cpu")
    device = gpu(cluster, number)
    torch.cuda.set_device(number)
    return device


def gpu(cluster: Cluster, number: int) -> torch.device:
    """This machine's GPU of that number.

    Raises:
        UsageError: it has no such GPU.
    """
    if number >= torch.cuda.device_count():
        raise UsageError(
            f"{cluster.name} needs GPU {number} of this machine, which shows {torch.cuda.device_count()}: choose a "
            "cluster of fewer devices, or emulated ones"
        )
    return torch.device("cuda", number)


def check_streams(devices: Iterable[torch.device]) -> None:
    """Check that GPUs train on their default streams, where backwards could not follow another one.

    Raises:
        UsageError: one does not, in a process that has profiled or certified for CUDA.
    """
    if not follows_fake_streams():
        return
    for device in devices:
        if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            raise UsageError(
                f"{device} trains on a stream of its own, in a process that has profiled or certified for CUDA, where "
                "backwards run on the default stream and would not wait for it: profile in another process, or train "
                "on the default stream"
            )


def meter_of(cluster: Cluster, number: int, device: torch.device, kernels: Kernels) -> MemoryMeter | None:
    """Emulated devices are metered and capped, GPUs read their allocator, plain CPU workers run free."""
    if device.type == "cuda":
        return CudaMeter(device)
    if cluster.backend == "cpu":
        return None
    return Meter(number, cap_bytes=cluster.devices[number].memory_bytes, kernels=kernels)
