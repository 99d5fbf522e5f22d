"""Training with torch's `fully_shard` on two processes: an oracle for sharded parameters."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipefit.capture import Task

WORKERS = 2


def fully_sharded(rank: int, folder: str, task: Task, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Train on slices of the batches; the first worker writes all parameters to `parameters.pt` in the
    folder.
    """
    dist.init_process_group("gloo", rank=rank, world_size=WORKERS, init_method=f"file://{folder}/meet")
    torch.manual_seed(0)
    module = task.build()
    mesh = init_device_mesh("cpu", (WORKERS,))
    for part in (*(layer for layer in module.children() if list(layer.parameters())), module):
        # Gradients are summed and the loss is divided: on gloo a mean does nothing (PyTorch issue 162338)
        fully_shard(part, mesh=mesh).set_gradient_divide_factor(1.0)
    optimizer = task.optimizer(module.parameters())
    for inputs, targets in batches:
        loss = task.loss(module(inputs.chunk(WORKERS)[rank]), targets.chunk(WORKERS)[rank])
        (loss / WORKERS).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: _whole(tensor) for name, tensor in module.state_dict().items()}
    if rank == 0:
        torch.save(whole, Path(folder) / "parameters.pt")
    dist.destroy_process_group()


def _whole(tensor: Tensor | nn.Parameter) -> Tensor:
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().clone()
