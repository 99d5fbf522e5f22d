"""How a trainer joins the workers that a launcher has started, and where it computes."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from pipefit.errors import UsageError
from pipefit.plans import Plan
from pipefit.runtime.hardware import backend_of, check_hosts, local_device


def joins_workers(plan: Plan, timeout_seconds: float) -> bool:
    """Whether this process is one of several workers; joins their process group if a launcher has set one up.

    Raises:
        UsageError: there are not as many workers as the plan has devices in use, or not on the plan's hosts.
    """
    if not dist.is_initialized() and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = backend_of(plan)
        # NCCL's timeout would end the process that waits, not the one that hangs (see `transport.connect`).
        dist.init_process_group(backend, timeout=None if backend == "nccl" else timedelta(seconds=timeout_seconds))
        atexit.register(_part)
    if not dist.is_initialized():
        return False
    if dist.get_world_size() != len(plan.ranks):
        raise UsageError(
            f"the plan uses {len(plan.ranks)} devices, but {dist.get_world_size()} workers were started: "
            f"start one for each device, as torchrun --nproc-per-node {len(plan.ranks)} does"
        )
    check_hosts(plan, dist.get_rank())
    return True


def device_of(plan: Plan, rank: int) -> torch.device:
    """Where this process runs a rank's stages: on the plan's device, in whatever order stages are on devices."""
    return local_device(plan.cluster, plan.stages[plan.ranks[rank][0]].device)


def _part() -> None:
    """Leave the process group that the trainer joined, whose threads may otherwise abort the process at its exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
