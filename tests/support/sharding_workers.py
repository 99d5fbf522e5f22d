"""Ranks of a tensor-parallel group, run by `tests/sharding/test_collectives.py` in processes and in
threads.
"""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from pipefit.measure.cpu import Meter
from pipefit.tensor_parallel import Collectives, ProcessGroupCollectives
from pipefit.tensor_parallel.collectives import copied, gathered, reduced, scattered, sliced, spread
from pipefit.tensor_parallel.forms import DimSplit

PATIENCE = timedelta(seconds=60)


def talk(rank: int, store: str, pipe: Connection) -> None:
    """Join the other process, and send the results to the parent."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=PATIENCE)
    group = ProcessGroupCollectives()
    pipe.send((*both(group), sum(kept_bytes(group) for _ in range(100))))
    dist.destroy_process_group()


def both(group: Collectives) -> tuple[dict[str, list[float]], list[float]]:
    """Run all collectives, and all seams."""
    return all_collectives(group), through_seams(group)


def kept_bytes(group: Collectives) -> int:
    """Return the bytes that a meter counts for inputs and outputs of collectives after the caller drops
    them.
    """
    with Meter(group.rank) as meter:
        for collective in (
            group.all_gather,
            group.all_to_all,
            group.all_reduce,
            lambda x: group.broadcast(x, 0),
        ):
            collective(torch.ones(group.size, 36))
    return meter.total


def all_collectives(group: Collectives) -> dict[str, list[float]]:
    """Run an all-reduce, an all-gather, an all-to-all, and a broadcast from the last rank."""
    own = torch.tensor([group.rank + 1.0, 0.0])
    each = own[0] * 10 + torch.arange(group.size).reshape(-1, 1)
    return {
        "all": torch.cat(group.all_gather(own)).tolist(),
        "exchange": group.all_to_all(each).flatten().tolist(),
        "source": group.broadcast(own.clone(), group.size - 1).tolist(),
        "sum": group.all_reduce(own).tolist(),
    }


def through_seams(group: Collectives) -> list[float]:
    """Return gradients of a small network sharded over the ranks, using each seam once."""
    torch.manual_seed(0)
    x, up, down = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (8, 4), (4, 8))
    )
    inner = copied(x, group) @ sliced(up, DimSplit(0), group).T
    whole = reduced(inner.tanh() @ sliced(down, DimSplit(1), group).T, group)
    some = scattered(inner.tanh() @ sliced(down, DimSplit(1), group).T, DimSplit(1), group)
    mean = spread(some, DimSplit(1), 4, group) @ sliced(up, DimSplit(0), group).T
    (whole + gathered(inner, DimSplit(1), 8, group)[:, ::2]).square().sum().backward(retain_graph=True)
    reduced(mean.sum(1), group).square().sum().backward()
    gradients = [leaf.grad for leaf in (x, up, down) if leaf.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients]).tolist()
