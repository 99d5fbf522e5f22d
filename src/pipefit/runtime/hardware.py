"""Hardware for a cluster's devices: torch devices, backends, memory meters and free host memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from pipefit.errors import UsageError, all_lines, no_memory
from pipefit.fake_cuda.target import follows_fake_streams
from pipefit.measure import CudaMeter, Kernels, MemoryMeter, Meter, OverCap
from pipefit.memory import communicators
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.schema.trace import CATEGORIES, Category, MemorySample

# ---- Free memory of this host

_MEMINFO, _CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = _MEMINFO, container: Path = _CONTAINER) -> int:
    """Return the bytes that a process may still allocate on the machine and in its container.

    If the system does not report free memory, return half of the machine's memory.
    """
    free = _number(meminfo, r"MemAvailable:\s+(\d+) kB")
    machine = (
        free * 1024 if free is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    )
    limit, used = _number(container / "memory.max", r"(\d+)"), _number(container / "memory.current", r"(\d+)")
    if limit is None or used is None:
        return machine
    files = _number(container / "memory.stat", r"inactive_file (\d+)") or 0  # reclaimable file cache
    return min(machine, limit - used + files)


def _number(path: Path, pattern: str) -> int | None:
    """Return the number that `pattern` captures in a file; None if the file or the number is missing."""
    try:
        result = re.search(pattern, path.read_text())
    except OSError:
        return None
    return int(result[1]) if result else None


# ---- Out-of-memory errors of torch's allocator and of other libraries
# cuBLAS, cuDNN, NCCL and others allocate part of their memory outside of torch. If the device has none left,
# they fail with their own errors, which torch passes on as a plain `RuntimeError`:
# "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", or "ncclUnhandledCudaError: Call to CUDA
# function failed. Cuda failure 2 'out of memory'".

_ASKED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|[KMGT]iB)\b")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class Moment(NamedTuple):
    """Memory of a device that ran out, including the failed allocation, and that allocation's bytes.

    The bytes are 0 if unknown.
    """

    sample: MemorySample
    asked_bytes: int


def moment(error: BaseException, meter: MemoryMeter | None, step: int, seconds: float) -> Moment | None:
    """Return the moment of an out-of-memory error in the action that a meter has begun; None without a meter.

    The project's meter includes the failed allocation in its sample. Torch's allocator does not: it only
    prints the size, to a few digits, and the size is added here to temporary memory.
    """
    if meter is None:
        return None
    sample = meter.end(step, seconds)
    if isinstance(error, OverCap):
        return Moment(sample, error.asked_bytes)
    said = _ASKED.search(str(error))
    asked = round(float(said[1]) * _UNITS[said[2]]) if said else 0
    temporary = CATEGORIES.index(Category.TEMPORARY)
    counted = (nbytes + asked * (place == temporary) for place, nbytes in enumerate(sample.bytes))
    return Moment(replace(sample, bytes=tuple(counted)), asked)  # type: ignore[arg-type]


def named(error: BaseException, device: int, action: str) -> str:
    """Return the message of an out-of-memory error with device and action.

    The project's meters already name them.
    """
    if isinstance(error, OverCap):
        return str(error)
    return f"device {device} ran out of memory at {action}: {all_lines(error)}"


def ran_out(error: BaseException) -> bool:
    """Return whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or no_memory(error)


# ---- Devices of a plan on this machine


@dataclass(frozen=True, slots=True)
class Hardware:
    """This machine as the hardware of a plan's devices; with `shared`, its first GPU is all of them."""

    plan: Plan
    shared: bool = False

    @property
    def backend(self) -> str:
        """Backend of `torch.distributed` for the plan's workers: gloo, or NCCL for workers with a GPU each.

        Raises:
            UsageError: the plan is for GPUs, and this machine has none.
        """
        cluster = self.plan.cluster
        if cluster.backend != "cuda":
            return "gloo"
        if not torch.cuda.is_available():
            raise UsageError(
                f"the plan is for {cluster.name}, but this machine does not have a GPU: run pipefit "
                "certify, which needs none, or plan for emulated devices to train here, such as "
                f"emulated:{len(self.plan.stages)}x256MiB"
            )
        return "gloo" if self.shared else "nccl"

    def device(self, number: int) -> torch.device:
        """Return the torch device of a device of the plan, and make a GPU the current one.

        Raises:
            UsageError: the machine lacks this GPU.
        """
        if self.plan.cluster.backend != "cuda":
            return torch.device("cpu")
        device = self.gpu(number)
        torch.cuda.set_device(device)
        return device

    def gpu(self, number: int) -> torch.device:
        """Return this machine's GPU for one of the plan's devices; the first GPU if all devices share it.

        The GPU's number is the device's number or, if workers run on several machines, the device's index on
        its host. If a launcher shows every worker a single GPU, it is that GPU.

        Raises:
            UsageError: the machine lacks this GPU.
        """
        if self.shared:
            return torch.device("cuda", 0)
        there, shown = _number_here(self.plan.cluster, number), torch.cuda.device_count()
        if shown == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
            return torch.device("cuda", 0)  # as under SLURM; torchrun sets LOCAL_WORLD_SIZE
        if there >= shown:
            raise UsageError(
                f"{self.plan.cluster.name} needs GPU {there} of this machine, which has {shown}: choose a "
                "cluster of fewer devices, emulated devices, or one shared GPU (--share-device)"
            )
        return torch.device("cuda", there)

    def cap_bytes(self, program: Program, number: int) -> int | None:
        """Return the bytes that a GPU's allocator may reserve for a device.

        These are its memory minus CUDA context and communicators. None if one GPU is all devices: its
        allocator needs memory for all of them.
        """
        if self.shared:
            return None
        device = self.plan.cluster.devices[number]
        own = device.kind.overheads
        count = communicators(self.plan, program, number)
        return device.memory_bytes - own.context_bytes - count * own.communicator_bytes

    def meter(
        self, number: int, device: torch.device, kernels: Kernels, *, gpu_bytes: int | None = None
    ) -> MemoryMeter | None:
        """Return the memory meter of a device.

        Emulated devices have a capped meter, GPUs that of their allocator, and plain CPU workers None.
        `gpu_bytes` is the limit of memory that a GPU's allocator may reserve; None leaves the limit to the
        process.
        """
        if device.type == "cuda":
            return CudaMeter(device, cap_bytes=gpu_bytes)
        if self.plan.cluster.backend == "cpu":
            return None
        return Meter(number, cap_bytes=self.plan.cluster.devices[number].memory_bytes, kernels=kernels)


def _number_here(cluster: Cluster, number: int) -> int:
    """Return a device's number on this machine.

    It is the device's number, or its index on its host if other machines run workers too.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return number
    host = cluster.devices[number].host
    return sum(device.host == host for device in cluster.devices[:number])


def check_hosts(plan: Plan, rank: int) -> None:
    """Check that the workers on the machine of `rank` are exactly those of one host of the plan.

    torchrun has started them.

    Raises:
        UsageError: they are not; says which workers belong together.
    """
    told = [os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    local, count = (int(text or -1) for text in told)
    if plan.cluster.backend != "cuda" or None in told or count == len(plan.workers):
        return  # unknown, or all on this machine, on whatever hosts the plan has their devices
    hosts = [plan.cluster.devices[device].host for device in plan.workers]
    started, host = list(range(rank - local, rank - local + count)), hosts[rank]
    together = [number for number, other in enumerate(hosts) if other == host]
    if started != together:
        raise UsageError(
            f"workers {started} were started on one machine, but worker {rank} belongs to host {host}, "
            f"which has workers {together} by the plan: start {len(together)} there, such as with torchrun "
            "--nproc-per-node, with machines in the order of the cluster's hosts"
        )


def check_backwards(devices: Iterable[torch.device]) -> None:
    """Check that torch can run backwards on these devices: a process with a fake GPU cannot on real GPUs.

    Raises:
        UsageError: one is a GPU, in such a process.
    """
    if follows_fake_streams() and any(device.type == "cuda" for device in devices):
        raise UsageError(
            "this process has profiled or certified for CUDA with simulated GPUs, after which torch cannot "
            "run a backward on a real GPU: plan and certify before the first backward, or do it in another "
            "process and load the plan here"
        )
