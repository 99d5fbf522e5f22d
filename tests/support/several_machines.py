"""Training that torchrun starts on several machines: the plan's replicas, shards and stages span them.

`torchrun ... several_machines.py PLAN` trains the plan in that file, saves next to it after every step, and
resumes from the checkpoint. A worker whose number is the name of a file there kills its process once, at the
step written in the file.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from pipefit import Plan, Training, load, load_cluster
from pipefit.capture import Task
from pipefit.checkpoints import whole
from pipefit.runtime import Trainer
from pipefit.schema.grids import Grid, Stage
from support import sharded_stages
from support.known_profiles import profile

BATCH, STEPS, MACHINES, EACH, SAVED = 8, 5, 2, 2, "saved"


def task() -> Task:
    """Build layers without draws, so that local batches of any size give the numbers of the whole batch."""
    return sharded_stages.divided("still", optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step, the same on every worker and after every start."""
    torch.manual_seed(step)
    return sharded_stages.batch(BATCH)


def plan_across() -> Plan:
    """Return a plan on machines of two devices each: the shards of the first stage are on both, and so are
    the replicas of the second, which shard the optimizer's state.
    """
    return Plan(
        profile=profile(task(), microbatch_size=(4, 2), tensor=(1, 2)),
        cluster=load_cluster("emulated:2x64MiB").machines(MACHINES, 1e9),
        training=Training(batch_size=BATCH, microbatches=2, precision="float64"),
        stages=(
            Stage(start=0, stop=3, grid=Grid(devices=(0, 2), tensor=2)),
            Stage(start=3, stop=6, grid=Grid(devices=(3, 1), data=2, shard="optimizer")),
        ),
    )


@cache
def plain_training() -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and parameters of a plain loop over whole batches."""
    torch.manual_seed(0)
    module, losses = task().build(), list[float]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = batch_of(step)
        loss = F.mse_loss(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(module.state_dict())


def main() -> None:
    """Train; the first worker prints the losses."""
    plan = Path(sys.argv[1])
    trainer, saved = Trainer(task(), load(plan), numbers=False), plan.parent / SAVED
    if whole(saved):
        trainer.load(saved)
    mine = plan.parent / str(trainer.rank)
    for step in range(trainer.steps_done, STEPS):
        if mine.exists() and int(mine.read_text()) == step:
            mine.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = trainer.step(batch_of(step))
        trainer.save(saved, keep=2)
        if trainer.rank == 0:
            print(f"{step} {loss!r}", flush=True)
    trainer.finish()


if __name__ == "__main__":
    main()
