"""A worker that only lends memory of the first GPU, started by `tests/runtime/test_gpu_moving.py`."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from pipefit.memory.arenas import Arena
from pipefit.runtime.offload.cuda import CudaDriver
from pipefit.runtime.offload.lending import CudaMemory
from pipefit.schema.cluster import Cluster


def lend(arenas: Sequence[Arena], pipe: Connection) -> None:
    """Zero and announce these arenas; on request, report the arenas that no longer hold only zeros."""
    torch.cuda.set_device(0)
    memory = CudaMemory(
        Cluster.emulated((2, 1)), arenas, lambda number: torch.device("cuda", 0), CudaDriver()
    )
    told = [memory.lend(arena)[0] for arena in arenas]
    lent = [slots[0].owner for slots in map(memory.borrow, arenas, told)]
    for tensor in lent:
        assert isinstance(tensor, torch.Tensor)
        tensor.zero_()
    torch.cuda.synchronize()
    pipe.send(told)
    pipe.recv()
    pipe.send([isinstance(tensor, torch.Tensor) and bool(tensor.any()) for tensor in lent])
    pipe.recv()
