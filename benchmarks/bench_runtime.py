"""Claim: the runtime costs no more than its peers on the same split and schedule.

A GPT of about 10 M parameters, two stages, eight microbatches, one thread a stage. In one run, interleaved repeat by
repeat:

    pipefit 1F1B           two worker processes, gloo, unmetered devices
    pipefit 1F1B metered   the same on emulated devices, whose meter enforces a cap
    torch 1F1B             torch.distributed.pipelining, two processes, gloo
    pipefit GPipe          as above
    torchgpipe GPipe       one process, a Python thread a stage, and as many kernel threads as there are cores

Every repeat of a system is a few steps; the figure is the median over repeats of the time per step, and the ratios are
medians of the ratios repeat by repeat, so that the machine's drift cancels. The predicted step time is simulated from a
profile measured on the same machine at the start of the same run.

    python benchmarks/bench_runtime.py [--repeats 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

SETTINGS = {"layers": 6, "hidden": 352, "heads": 8, "vocabulary": 512, "sequence": 128, "dropout": 0.0}
BATCH, MICROBATCHES, STEPS = 16, 8, 3
SYSTEMS = ("pipefit 1f1b", "pipefit 1f1b metered", "torch 1f1b", "pipefit gpipe", "torchgpipe gpipe")


def make_task() -> Any:
    """The model of the comparison."""
    from pipefit.zoo import build

    return build("gpt", **SETTINGS)


def make_plan(schedule: str, backend: str, device: str = "fake") -> Any:
    """Two stages cut where the time is balanced."""
    from dataclasses import replace

    from pipefit.cluster import Cluster
    from pipefit.grids import Grid, Stage
    from pipefit.plans import Plan
    from pipefit.profiler import profile
    from pipefit.training import Training

    found = profile(make_task(), microbatch_size=BATCH // MICROBATCHES, device=device)
    layers = len(found.layers)
    half = layers // 2
    return Plan(
        profile=found,
        cluster=replace(Cluster.emulated((2, 8 << 30)), backend=backend),
        training=Training(batch_size=BATCH, microbatches=MICROBATCHES, schedule=schedule),
        stages=(Stage(start=0, stop=half, grid=Grid.of(0)), Stage(start=half, stop=layers, grid=Grid.of(1))),
    )


def worker(rank: int, store: str, pipe: Connection) -> None:
    """One of two processes that hold both pipefit's and torch's pipeline and run whichever is asked for."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    runs = {name: make(rank) for name, make in WORKER_SYSTEMS.items()}
    batch = make_task().batch(BATCH)
    pipe.send("ready")
    while (name := pipe.recv()) != "stop":
        dist.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            runs[name](batch)
        dist.barrier()
        pipe.send((time.perf_counter() - began) / STEPS)
    dist.destroy_process_group()


def pipefit_system(schedule: str, backend: str, rank: int) -> Any:
    """pipefit's trainer on this rank."""
    from pipefit.runtime import Trainer

    return Trainer(make_task(), make_plan(schedule, backend)).step


def torch_system(rank: int) -> Any:
    """torch's 1F1B on this rank."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    task = make_task()
    torch.manual_seed(0)
    layers = list(task.build())
    half = len(layers) // 2
    part = torch.nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=task.loss)
    optimizer = task.optimizer(part.parameters())

    def step(batch: Any) -> None:
        inputs, targets = batch
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchgpipe_worker(pipe: Connection) -> None:
    """torchgpipe in a process of its own, two CPU devices."""
    import torch
    from torchgpipe import GPipe

    torch.set_num_threads(os.cpu_count() or 1)
    task = make_task()
    torch.manual_seed(0)
    module = task.build()
    half = len(module) // 2
    model = GPipe(
        module, balance=[half, len(module) - half], devices=["cpu", "cpu"], chunks=MICROBATCHES, checkpoint="never"
    )
    optimizer = task.optimizer(model.parameters())
    inputs, targets = task.batch(BATCH)
    pipe.send("ready")
    while pipe.recv() != "stop":
        began = time.perf_counter()
        for _ in range(STEPS):
            task.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        pipe.send((time.perf_counter() - began) / STEPS)


WORKER_SYSTEMS = {
    "pipefit 1f1b": partial(pipefit_system, "1f1b", "cpu"),
    "pipefit 1f1b metered": partial(pipefit_system, "1f1b", "emulated"),
    "torch 1f1b": torch_system,
    "pipefit gpipe": partial(pipefit_system, "gpipe", "cpu"),
}


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds per step of every system, repeat by repeat."""
    context = mp.get_context("spawn")
    store = os.path.join(tempfile.mkdtemp(), "store")
    pipes = []
    jobs = [(worker, (0, store)), (worker, (1, store)), (torchgpipe_worker, ())]
    for target, args in jobs:
        ours, theirs = context.Pipe()
        context.Process(target=target, args=(*args, theirs), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for repeat in range(repeats + 1):
        for name in SYSTEMS[repeat % len(SYSTEMS) :] + SYSTEMS[: repeat % len(SYSTEMS)]:
            asked = pipes[2:] if name.startswith("torchgpipe") else pipes[:2]
            for pipe in asked:
                pipe.send(name)
            took = max(pipe.recv() for pipe in asked)
            if repeat:  # the first warms up
                seconds[name].append(took)
    for pipe in pipes:
        pipe.send("stop")
    return seconds


def predict(schedule: str) -> float:
    """Seconds of a steady step, simulated from a measured profile."""
    from pipefit.simulator import simulate

    return simulate(make_plan(schedule, "cpu", device="cpu"), steps=2).step_seconds[-1]


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    """Median of the ratios repeat by repeat."""
    return statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True))


def main() -> None:
    """Print the table; with `--json`, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    parameters = sum(p.numel() for p in make_task().build().parameters())
    predicted = {f"pipefit {schedule}": predict(schedule) for schedule in ("1f1b", "gpipe")}
    seconds = measure(options.repeats)
    print(
        f"GPT, {parameters / 1e6:.1f} M parameters, 2 stages, {MICROBATCHES} microbatches, "
        f"{options.repeats} repeats of {STEPS} steps"
    )
    for name, values in seconds.items():
        print(
            f"{name:24} {statistics.median(values) * 1e3:8.1f} ms a step   "
            f"({min(values) * 1e3:.1f} - {max(values) * 1e3:.1f})"
        )
    ratios = {
        "pipefit 1f1b / torch 1f1b": ratio(seconds, "pipefit 1f1b", "torch 1f1b"),
        "pipefit 1f1b metered / torch 1f1b": ratio(seconds, "pipefit 1f1b metered", "torch 1f1b"),
        "pipefit gpipe / torchgpipe gpipe": ratio(seconds, "pipefit gpipe", "torchgpipe gpipe"),
    }
    for name, value in ratios.items():
        print(f"{name:40} {value:.3f}")
    errors = {name: value / statistics.median(seconds[name]) - 1 for name, value in predicted.items()}
    for name, value in predicted.items():
        print(f"{name:24} predicted {value * 1e3:.1f} ms a step, {errors[name]:+.1%}")
    if options.json:
        from measured_on import machine

        with open(options.json, "w") as file:
            json.dump(
                {
                    "machine": machine(),
                    "parameters": parameters,
                    "settings": SETTINGS,
                    "seconds": seconds,
                    "ratios": ratios,
                    "predicted": predicted,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
