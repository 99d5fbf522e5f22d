"""Plans with random decisions to offload saved tensors, for real models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Microbatches, SavedTensors, What
from pipefit.schema.devices import Link
from pipefit.schema.plan import Plan
from support.failing_tasks import Spot
from support.offload_choices import movable, random_place


class Attention(nn.Module):
    """Attention over rows of four words, with dropout and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(width // 4, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        words = x.view(x.shape[0], 4, -1)
        return x + self.mix(words, words, words, need_weights=False)[0].reshape(x.shape)


def with_disk(cluster: Cluster, folder: Path | None = None, disk_bytes: int = 1 << 20) -> Cluster:
    """Return the cluster with a disk on its first host."""
    host = replace(cluster.hosts[0], disk_bytes=disk_bytes, disk_folder=folder and str(folder))
    link = Link.between("host0", "disk0", bytes_per_second=1e9)
    return replace(cluster, hosts=(host, *cluster.hosts[1:]), links=(*cluster.links, link))


def moving(plan: Plan, rng: Random) -> Plan:
    """Return the plan with up to three random decisions in every stage, each about one or several saved
    tensors.

    In half of the plans nothing is recomputed.
    """
    plan = replace(plan, decisions=()) if rng.random() < 0.5 else plan
    decisions = []
    for number in range(len(plan.stages)):
        names = movable(plan, number)
        rng.shuffle(names)
        for _ in range(rng.randint(1, 3)):
            taken, names = names[: (cut := rng.choice([1, 1, 2, 4]))], names[cut:]
            if taken:
                every = rng.randint(1, 3)
                decisions.append(
                    Decision(
                        stage=number,
                        subject=SavedTensors(tensors=tuple(taken)),
                        what=What.OFFLOAD,
                        place=random_place(plan, number, rng),
                        microbatches=Microbatches(rng.randint(1, every), every, rng.randrange(every)),
                        behind=rng.choice([0, 0, 1, 2]),
                        ahead=rng.choice([0, 0, 1, 2]),
                    )
                )
    return replace(plan, decisions=(*plan.decisions, *decisions))


def make_chain(accident: str = "none") -> Task:
    """Build layers that save their outputs; the fourth, the first of the second half, has the accident."""

    def build() -> nn.Module:
        first = nn.Linear(8, 64), nn.Sigmoid(), nn.Linear(64, 8)
        return nn.Sequential(*first, Spot(accident), nn.Tanh(), nn.Linear(8, 4))

    return Task(build, batch=make_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.AdamW)


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """Return noise."""
    return torch.randn(size, 8), torch.randn(size, 4)


def make_wide() -> Task:
    """Build layers that take milliseconds."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 2048), nn.Sigmoid(), nn.Linear(2048, 2048), nn.Linear(2048, 4))

    return Task(build, batch=make_batch, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
