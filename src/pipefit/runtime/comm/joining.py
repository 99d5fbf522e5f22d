"""Joins a trainer with the workers that a launcher has started."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from pipefit.errors import PeerLost, UsageError, all_lines
from pipefit.lowering import whole_run
from pipefit.memory import tensor_groups
from pipefit.runtime.comm.transport import InProcess, Network, Owners, Transport, check_members, connect
from pipefit.runtime.engine.tensor_groups import TensorGroups, Together
from pipefit.runtime.hardware import Hardware, check_hosts
from pipefit.runtime.offload.lending import Lending
from pipefit.schema.actions import SENDS, Action, Message
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.texts import counted

# ---- Messages through the host, for workers that share a GPU
# NCCL refuses to connect them, and gloo takes host memory. Sent tensors are copied to the host first, and
# received ones lie there until the join. So a message takes equal bytes of the host and of the device at
# either end, and devices wait for their copies: this is for tests and single GPUs, not for speed.


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A transfer between hosts, its host buffers, and the device tensors that wait for their contents."""

    handle: Any
    buffers: list[Tensor]
    waiting: list[Tensor]


@dataclass(frozen=True, slots=True)
class HostBuffers:
    """A transport over `hosts`, another transport, which takes tensors on the host."""

    hosts: Transport

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> _OnHost:
        sends = action.kind in SENDS
        buffers = [_copied(tensor) if sends else _buffer(tensor) for tensor in tensors]
        return _OnHost(self.hosts.start(action, buffers, message), buffers, [] if sends else tensors)

    def collect(
        self,
        action: Action,
        tensors: list[Tensor],
        members: tuple[int, ...],
        device: int,
        owners: Owners = (),
    ) -> _OnHost:
        buffers = list(map(_copied, tensors))
        return _OnHost(self.hosts.collect(action, buffers, members, device, owners), buffers, tensors)

    def ready(self, handle: _OnHost) -> bool:
        return self.hosts.ready(handle.handle)

    def join(self, action: Action, handle: _OnHost) -> None:
        self.hosts.join(action, handle.handle)
        for tensor, buffer in zip(handle.waiting, handle.buffers, strict=False):  # for receivers only
            tensor.copy_(buffer)

    def abandon(self) -> None:
        self.hosts.abandon()


def _buffer(tensor: Tensor) -> Tensor:
    """Return host memory for a tensor: pinned, if the tensor is on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy on the host, complete on return, so that gloo may read it."""
    return _buffer(tensor).copy_(tensor)


# ---- Workers

# Workers that torchrun restarts get the addresses of their predecessors (pytorch issue 135712); under
# --node-rank those of another machine do, even with this set.
_ADVICE = (
    "; if torchrun should restart workers, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it, and use "
    "--rdzv-backend=c10d with several machines"
)


def joins_workers(hardware: Hardware, timeout_seconds: float) -> bool:
    """Return whether this process is one of a plan's workers.

    Join the process group that a launcher has set up.

    Raises:
        PeerLost: the workers do not find each other.
        UsageError: the number of workers is not the plan's number of devices in use, or they are not on the
            plan's hosts.
    """
    if not dist.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = hardware.backend
        # NCCL's timeout would end the process that waits, not the one that hangs (see `transport.connect`).
        try:
            dist.init_process_group(
                backend, timeout=None if backend == "nccl" else timedelta(seconds=timeout_seconds)
            )
        except RuntimeError as error:
            raise PeerLost(
                f"the workers could not connect to each other ({all_lines(error)}){_ADVICE}"
            ) from error
        atexit.register(_part)
        check_members(None, "all")
    if not dist.is_initialized():
        return False
    count = len(hardware.plan.workers)
    if dist.get_world_size() != count:
        raise UsageError(
            f"the plan uses {counted(count, 'device')}, but the launcher started "
            f"{counted(dist.get_world_size(), 'worker')}: start one worker for each device, such as with "
            f"torchrun --nproc-per-node {count}"
        )
    if not hardware.shared:
        check_hosts(hardware.plan, dist.get_rank())
    return True


def transport_of(
    hardware: Hardware, program: Program, here: torch.device, timeout_seconds: float
) -> Transport:
    """Return the transport between this worker, which computes on `here`, and the others. All must call it.

    Raises:
        UsageError: workers that share a GPU hold tensor shards.
    """
    plan, timeout = hardware.plan, timedelta(seconds=timeout_seconds)
    if hardware.shared and here.type == "cuda":
        if tensor_groups(plan):
            raise UsageError(
                "workers that share a GPU cannot compute tensor-parallel layers together, because their "
                "messages go through the host: use one GPU for each device, or a plan without tensor "
                "parallelism"
            )
        return HostBuffers(connect(plan, program, torch.device("cpu"), timeout))
    return connect(plan, program, here, timeout)


def connected(
    hardware: Hardware, program: Program, worker: int | None, timeout_seconds: float
) -> tuple[Transport, Lending]:
    """Return transport and lending of a worker, or of a single process if `worker` is None.

    All workers must call it before they build their layers, because building may take longer on one than on
    another.

    Raises:
        OutOfMemory: offloaded tensors do not fit a host, a disk or a lender.
        UsageError: this machine cannot run the plan.
    """
    plan = hardware.plan
    run = whole_run(plan)
    if worker is None:
        return InProcess(), Lending.within(hardware, run)
    number = plan.workers[worker]
    here = hardware.device(number)
    return transport_of(hardware, program, here, timeout_seconds), Lending.between(
        hardware, run, number, here
    )


def groups_of(plan: Plan, transport: Transport) -> TensorGroups:
    """Return the collectives of tensor groups: between workers, or in this process."""
    return transport.end if isinstance(transport, Network) else Together(plan)


def _part() -> None:
    """Leave the process group that the trainer joined.

    Its threads may otherwise abort the process at its exit.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
