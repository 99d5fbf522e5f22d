"""Where the first hour is spent: on a GPU, or in a dry run of its scripts on the CPU. Not a benchmark itself.

`Gpu` and `Cpu` have the same methods. On the CPU there is no allocator to ask, so that the meter of an emulated device
answers for requested bytes, and figures that only a GPU has are None.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch.utils.collect_env import get_nvidia_driver_version, run

from pipefit.measure.cuda import memory_figures
from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.runtime import Trainer
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Device

Figures = Mapping[str, int | None]


class Machine(Protocol):
    """What runs and is measured."""

    device: torch.device
    target: Literal["cpu", "cuda"]
    allocator: AllocatorSettings | None

    def cluster(self, memory_bytes: int | None = None) -> Cluster:
        """This device alone, with all of its memory unless said otherwise."""

    def clear(self) -> None:
        """Give back all memory that is cached and allow all, and begin to count peaks anew."""

    def figures(self, trainer: Trainer | None = None) -> Figures:
        """Peaks of a training, or since `clear` without one: requested, allocated, reserved; and what the process takes
        now. A trainer's meter restarts torch's peaks at every action, and keeps the highest.
        """

    def held(self) -> int | None:
        """Bytes of the allocator's blocks that are in use now, as they were requested."""

    def named(self) -> dict[str, Any]:
        """What was measured."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU of this machine, and what its kind is in a preset."""

    kind: str = "hgx-h100"
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    target: Literal["cpu", "cuda"] = "cuda"
    allocator: AllocatorSettings | None = field(default_factory=AllocatorSettings)

    def cluster(self, memory_bytes: int | None = None) -> Cluster:
        preset = Cluster.preset(self.kind)
        memory = memory_bytes or torch.cuda.get_device_properties(self.device).total_memory
        one = Device(kind=preset.devices[0].kind, memory_bytes=memory)
        return Cluster(name="this GPU", backend="cuda", devices=(one,), hosts=preset.hosts[:1])

    def clear(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(
            1.0, self.device
        )  # a trainer holds it to its plan's memory
        torch.cuda.reset_peak_memory_stats(self.device)

    def figures(self, trainer: Trainer | None = None) -> Figures:
        torch.cuda.synchronize(self.device)
        figures = memory_figures(self.device)
        own = None if trainer is None else trainer.trace.devices[0].allocator
        if own is None:
            return figures
        peaks = {
            "requested": own.requested_bytes,
            "allocated": own.allocated_bytes,
            "reserved": own.reserved_bytes,
        }
        return {**figures, **peaks}

    def held(self) -> int | None:
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.memory_stats(self.device)["requested_bytes.all.current"])

    def named(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": get_nvidia_driver_version(run),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }


@dataclass(frozen=True, slots=True)
class Cpu:
    """An emulated device, which takes the part of the GPU in a dry run of the scripts."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    target: Literal["cpu", "cuda"] = "cpu"
    allocator: AllocatorSettings | None = None

    def cluster(self, memory_bytes: int | None = None) -> Cluster:
        return replace(Cluster.emulated((1, memory_bytes or 1 << 32)), name="this CPU")

    def clear(self) -> None:
        gc.collect()

    def figures(self, trainer: Trainer | None = None) -> Figures:
        requested = max(trainer.trace.peak_bytes) if trainer else None
        return {"requested": requested, "allocated": None, "reserved": None, "process_total": None}

    def held(self) -> int | None:
        return None

    def named(self) -> dict[str, Any]:
        return {"gpu": None}
