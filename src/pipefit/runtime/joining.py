"""How a trainer joins the workers that a launcher has started, and where it computes."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from pipefit.cost.communicators import tensor_groups
from pipefit.errors import PeerLost, UsageError, in_one_line
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.runtime.hardware import backend_of, check_hosts, local_device
from pipefit.runtime.host_buffers import HostBuffers
from pipefit.runtime.tensor_groups import TensorGroups, Together
from pipefit.runtime.token import check_members
from pipefit.runtime.transport import Network, Transport, connect

# Workers that torchrun has started again are given the addresses of those before them (pytorch issue 135712).
_ADVICE = "; where torchrun is to start workers again, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it"


def joins_workers(plan: Plan, timeout_seconds: float, *, share_device: bool) -> bool:
    """Whether this process is one of several workers; joins their process group if a launcher has set one up.

    Raises:
        PeerLost: the workers do not find each other.
        UsageError: there are not as many workers as the plan has devices in use, or not on the plan's hosts.
    """
    if not dist.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = backend_of(plan, share_device=share_device)
        # NCCL's timeout would end the process that waits, not the one that hangs (see `transport.connect`).
        try:
            dist.init_process_group(backend, timeout=None if backend == "nccl" else timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            raise PeerLost(f"the workers did not find each other ({in_one_line(error)}){_ADVICE}") from error
        atexit.register(_part)
        check_members(None, "all")
    if not dist.is_initialized():
        return False
    count = len(plan.workers)
    if dist.get_world_size() != count:
        raise UsageError(
            f"the plan uses {count} devices, but {dist.get_world_size()} workers were started: "
            f"start one for each device, as torchrun --nproc-per-node {count} does"
        )
    if not share_device:
        check_hosts(plan, dist.get_rank())
    return True


def device_of(plan: Plan, worker: int, *, share_device: bool = False) -> torch.device:
    """Where this process runs a worker's stages: on the plan's device, in whatever order stages are on devices."""
    return local_device(plan.cluster, plan.workers[worker], share_device=share_device)


def transport_of(
    plan: Plan, program: Program, here: torch.device, timeout_seconds: float, *, share_device: bool
) -> Transport:
    """How this worker, which computes `here`, exchanges tensors with the others. All must call it.

    Raises:
        UsageError: they share a GPU, and some hold tensor shards.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if share_device and here.type == "cuda":
        if tensor_groups(plan):
            raise UsageError(
                "workers that share a GPU cannot compute tensor shards together, for their messages go by way of the "
                "host: use a GPU for each device, or a plan without tensor shards"
            )
        return HostBuffers(connect(plan, program, torch.device("cpu"), timeout))
    return connect(plan, program, here, timeout)


def groups_of(plan: Plan, transport: Transport) -> TensorGroups:
    """How devices that hold the shards of one replica compute together: as workers, or in this process."""
    return transport.end if isinstance(transport, Network) else Together(plan)


def _part() -> None:
    """Leave the process group that the trainer joined, whose threads may otherwise abort the process at its exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
