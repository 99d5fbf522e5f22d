"""A worker that does nothing but lend memory of the first GPU: what `tests/runtime/test_gpu_moving.py` starts."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from pipefit.memory.arenas import Arena
from pipefit.runtime.offload.cuda import CudaDriver
from pipefit.runtime.offload.lending import CudaMemory
from pipefit.schema.cluster import Cluster


def lend(arenas: Sequence[Arena], pipe: Connection) -> None:
    """Tell of these arenas; when asked, tell which of them hold something else than the zeros of the beginning."""
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
