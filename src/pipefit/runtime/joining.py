"""How a trainer joins the workers that a launcher has started."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from pipefit.cost.communicators import tensor_groups
from pipefit.errors import PeerLost, UsageError, all_lines
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.runtime.hardware import Hardware, check_hosts
from pipefit.runtime.host_buffers import HostBuffers
from pipefit.runtime.lending import Lending
from pipefit.runtime.tensor_groups import TensorGroups, Together
from pipefit.runtime.token import check_members
from pipefit.runtime.transport import InProcess, Network, Transport, connect
from pipefit.schedule import whole_run
from pipefit.texts import counted

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
