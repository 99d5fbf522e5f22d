"""A worker that trains its part of an existing module, and then reads the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.runtime import Trainer
from pipefit.schema.plan import Plan

WORKERS = 2
READINGS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "call": lambda module, inputs: module(inputs),
    "state_dict": lambda module, _: module.state_dict(),
    "deepcopy": lambda module, _: copy.deepcopy(module),
    "save": lambda module, _: torch.save(module, BytesIO()),
}


def reading(rank: int, folder: str, task: Task, plan: Plan, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Train; write the errors of all readings and the tensors to a file of this worker."""
    dist.init_process_group("gloo", rank=rank, world_size=WORKERS, init_method=f"file://{folder}/meet")
    torch.manual_seed(0)
    module = task.build()
    trainer, refusals = Trainer(replace(task, module=module), plan), dict[str, str]()
    for batch in batches:
        trainer.step(batch)
        for name, read in READINGS.items():
            try:
                read(module, batch[0])
            except UsageError as refusal:
                refusals[name] = str(refusal)
    torch.save((refusals, trainer.state_dict()), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
