"""How a trainer joins the workers that a launcher has started."""

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
from pipefit.memory.arenas import tensor_groups
from pipefit.runtime.comm.transport import InProcess, Network, Owners, Transport, check_members, connect
from pipefit.runtime.engine.tensor_groups import TensorGroups, Together
from pipefit.runtime.hardware import Hardware, check_hosts
from pipefit.runtime.offload.lending import Lending
from pipefit.schema.actions import SENDS, Action, Message
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.texts import counted

# ----------------------------------------------------------------------------------------------------
# Messages by way of the host, for workers that share a GPU: NCCL refuses that, and gloo takes the host's
# memory.
#
# What is sent is copied to the host first, and what is received lies there until it is joined. So a message
# takes as much of the host at either end as of the device, and devices wait for their copies: this is for
# tests, and for people with one GPU, not for speed.


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A transfer between hosts, its buffers there, and the tensors of the device that wait for what is in them."""

    handle: Any
    buffers: list[Tensor]
    waiting: list[Tensor]


@dataclass(frozen=True, slots=True)
class HostBuffers:
    """A transport over `hosts`, another one that takes tensors on the host."""

    hosts: Transport

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> _OnHost:
        sends = action.kind in SENDS
        buffers = [_copied(tensor) if sends else _buffer(tensor) for tensor in tensors]
        return _OnHost(self.hosts.start(action, buffers, message), buffers, [] if sends else tensors)

    def collect(
        self, action: Action, tensors: list[Tensor], members: tuple[int, ...], device: int, owners: Owners = ()
    ) -> _OnHost:
        buffers = list(map(_copied, tensors))
        return _OnHost(self.hosts.collect(action, buffers, members, device, owners), buffers, tensors)

    def ready(self, handle: _OnHost) -> bool:
        return self.hosts.ready(handle.handle)

    def join(self, action: Action, handle: _OnHost) -> None:
        self.hosts.join(action, handle.handle)
        for tensor, buffer in zip(handle.waiting, handle.buffers, strict=False):  # a sender has none that wait
            tensor.copy_(buffer)

    def abandon(self) -> None:
        self.hosts.abandon()


def _buffer(tensor: Tensor) -> Tensor:
    """Memory of the host for a tensor: pinned, if it is for a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the host. It is there when this returns, so that gloo may read it."""
    return _buffer(tensor).copy_(tensor)


# ----------------------------------------------------------------------------------------------------

# Workers that torchrun has started again are given the addresses of those before them (pytorch issue 135712); under
# --node-rank those of another machine are, with this set too.
_ADVICE = (
    "; where torchrun is to start workers again, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it, and let several "
    "machines meet by --rdzv-backend=c10d"
)


def joins_workers(hardware: Hardware, timeout_seconds: float) -> bool:
    """Whether this process is one of a plan's workers; joins their process group if a launcher has set one up.

    Raises:
        PeerLost: the workers do not find each other.
        UsageError: there are not as many workers as the plan has devices in use, or not on the plan's hosts.
    """
    if not dist.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = hardware.backend
        # NCCL's timeout would end the process that waits, not the one that hangs (see `transport.connect`).
        try:
            dist.init_process_group(backend, timeout=None if backend == "nccl" else timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise PeerLost(f"the workers did not find each other ({all_lines(error)}){_ADVICE}") from error
        atexit.register(_part)
        check_members(None, "all")
    if not dist.is_initialized():
        return False
    count = len(hardware.plan.workers)
    if dist.get_world_size() != count:
        raise UsageError(
            f"the plan uses {counted(count, 'device')}, and the launcher started "
            f"{counted(dist.get_world_size(), 'worker')}: start one for each device, as torchrun --nproc-per-node "
            f"{count} does"
        )
    if not hardware.shared:
        check_hosts(hardware.plan, dist.get_rank())
    return True


def transport_of(hardware: Hardware, program: Program, here: torch.device, timeout_seconds: float) -> Transport:
    """How this worker, which computes `here`, exchanges tensors with the others. All must call it.

    Raises:
        UsageError: they share a GPU, and some hold tensor shards.
    """
    plan, timeout = hardware.plan, timedelta(seconds=timeout_seconds)
    if hardware.shared and here.type == "cuda":
        if tensor_groups(plan):
            raise UsageError(
                "workers that share a GPU cannot compute tensor shards together, for their messages go by way of the "
                "host: use a GPU for each device, or a plan without tensor shards"
            )
        return HostBuffers(connect(plan, program, torch.device("cpu"), timeout))
    return connect(plan, program, here, timeout)


def connected(
    hardware: Hardware, program: Program, worker: int | None, timeout_seconds: float
) -> tuple[Transport, Lending]:
    """How a worker exchanges tensors with the others and borrows their memory, or one process, without a worker, does.

    All must call it, before they build their layers, which may take longer on one than on another.

    Raises:
        OutOfMemory: there is no room for what is moved away.
        UsageError: this machine cannot do it.
    """
    plan = hardware.plan
    run = whole_run(plan)
    if worker is None:
        return InProcess(), Lending.within(hardware, run)
    number = plan.workers[worker]
    here = hardware.device(number)
    return transport_of(hardware, program, here, timeout_seconds), Lending.between(hardware, run, number, here)


def groups_of(plan: Plan, transport: Transport) -> TensorGroups:
    """How devices that hold the shards of one replica compute together: as workers, or in this process."""
    return transport.end if isinstance(transport, Network) else Together(plan)


def _part() -> None:
    """Leave the process group that the trainer joined, whose threads may otherwise abort the process at its exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
