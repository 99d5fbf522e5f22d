"""Claim: a step by `pipefit.pipeline` costs at most 1.02 times the same schedule built with torch alone.

That holds for layers that compute for milliseconds, which hide the work in Python for each pass, loss and step, such as
random seeds, copies of the batch, and separate memory for gradients.

Two gloo workers alternate between both, step by step, in one process each: the same layers, batch, microbatches, loss
and optimizer under `Schedule1F1B`. Their CPU seconds are compared, which other processes on the machine do not change.

    PYTHONPATH=src python benchmarks/bench_torch_engine_cost.py [--steps 40] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pipefit
from measured_on import machine
from pipefit.schema.plan import Plan
from support.small_tasks import plan_of, task_of
from support.torch_engine_workers import Workers

MICROBATCHES, WARM_UP = 8, 3


class Block(nn.Module):
    """A residual block of a transformer's size, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


def task(width: int) -> pipefit.Task:
    """Return the training of eight blocks."""
    return task_of(lambda: [Block(width) for _ in range(8)], inputs=width, outputs=width)


def by_hand(plan: Plan, width: int) -> Any:
    """Return a function that trains a step with torch alone."""
    rank, size = dist.get_rank(), plan.training.microbatch_size
    torch.manual_seed(0)
    layers = [Block(width) for _ in range(8)]
    place = plan.stages[rank]
    module = nn.Sequential(*layers[place.start : place.stop])
    like = torch.empty(size, width, device="meta", requires_grad=rank > 0)
    output = torch.empty(size, width, device="meta", requires_grad=True)
    gradient = torch.empty(size, width, device="meta")
    stage = PipelineStage(
        module,
        rank,
        2,
        torch.device("cpu"),
        input_args=(like,),
        output_args=(output,),
        input_grads=None if rank == 0 else (gradient,),
        output_grads=None if rank == 1 else (gradient,),
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step(inputs: Tensor, targets: Tensor) -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(mean, src=1)
        return float(mean)

    return step


def both(plan: Plan, width: int, steps: int) -> dict[str, float]:
    """Return this worker's median CPU seconds of a step, by either way."""
    unmetered = replace(plan, cluster=replace(plan.cluster, backend="cpu"))
    pipeline, hand = pipefit.pipeline(task(width), unmetered, numbers=False), by_hand(plan, width)
    inputs, targets = task(width).batch(plan.training.batch_size)
    ways = {"pipefit": lambda: pipeline.step(inputs, target=targets), "torch": lambda: hand(inputs, targets)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(steps + WARM_UP):
        for name in sorted(ways, reverse=bool(number % 2)):
            began = time.process_time()
            ways[name]()
            if number >= WARM_UP:
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Measure several widths and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pool, rows = Workers(2), []
    for width, size in ((64, 16), (256, 64), (512, 128)):
        plan = plan_of(task(width), (4, 4), size=size, microbatches=MICROBATCHES)
        workers = pool.run(2, both, plan, width, options.steps)
        ours, theirs = (sum(worker[name] for worker in workers) for name in ("pipefit", "torch"))
        rows.append(
            {"width": width, "samples": size, "pipefit": ours, "torch": theirs, "ratio": ours / theirs}
        )
        print(json.dumps(rows[-1]), flush=True)
    pool.close()
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "machine": machine()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
