"""Claim: the runtime costs no more than its peers on the same split and schedule.

A GPT of about 10 M parameters, two stages, eight microbatches, one thread a stage. In one run, interleaved repeat by
repeat:

    pipefit 1F1B             two worker processes, gloo, unmetered devices
    pipefit 1F1B metered     the same on emulated devices, whose meter enforces a cap
    torch 1F1B               torch.distributed.pipelining, two processes, gloo
    torch 1F1B, huge pages   the same in pipefit's processes
    pipefit GPipe            as above
    torchgpipe GPipe         one process, a Python thread a stage, and as many kernel threads as there are cores

pipefit's processes have the environment of its workers, by which malloc asks for huge pages; torch 1F1B has it too in
one of its rows, which so compares the runtimes alone. Every repeat of a system is a few steps; the figure is the median
over repeats of the time per step, and the ratios are medians of the ratios repeat by repeat, so that the machine's
drift cancels. CPU seconds are those of both workers, kernel and threads included, for machines with other work to do.
The predicted step time is simulated from a profile measured in such a process, on the same machine in the same run.

    python benchmarks/bench_runtime.py [--repeats 15] [--json FILE] [--set layers=2 ...]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

SETTINGS = {"layers": 6, "hidden": 352, "heads": 8, "vocabulary": 512, "sequence": 128, "dropout": 0.0}
BATCH, MICROBATCHES, STEPS = 16, 8, 3
OURS = (
    "pipefit 1f1b",
    "pipefit 1f1b metered",
    "torch 1f1b, huge pages",
    "pipefit gpipe",
)  # in pipefit's processes
TORCH, TORCHGPIPE = "torch 1f1b", "torchgpipe gpipe"
SYSTEMS = (*OURS, TORCH, TORCHGPIPE)
RATIOS = {
    "pipefit 1f1b / torch 1f1b": ("pipefit 1f1b", TORCH),
    "pipefit 1f1b / torch 1f1b, huge pages": ("pipefit 1f1b", "torch 1f1b, huge pages"),
    "pipefit 1f1b metered / torch 1f1b": ("pipefit 1f1b metered", TORCH),
    "pipefit gpipe / torchgpipe gpipe": ("pipefit gpipe", TORCHGPIPE),
}

Seconds = tuple[float, float]  # of a step: on the clock, and on the CPU


def make_task() -> Any:
    """The model of the comparison."""
    from pipefit.models import build

    return build("gpt", **SETTINGS)


def make_plan(schedule: str, backend: str, device: str = "fake") -> Any:
    """Two stages cut where the time is balanced."""
    from dataclasses import replace

    from pipefit.profiler import profile
    from pipefit.schema.cluster import Cluster
    from pipefit.schema.grids import Grid, Stage
    from pipefit.schema.plan import Plan
    from pipefit.schema.training import Training

    found = profile(make_task(), microbatch_size=BATCH // MICROBATCHES, device=device)
    layers = len(found.layers)
    half = layers // 2
    return Plan(
        profile=found,
        cluster=replace(Cluster.emulated((2, 8 << 30)), backend=backend),
        training=Training(batch_size=BATCH, microbatches=MICROBATCHES, schedule=schedule),
        stages=(Stage(start=0, stop=half, grid=Grid.of(0)), Stage(start=half, stop=layers, grid=Grid.of(1))),
    )


def worker(rank: int, store: str, settings: dict[str, Any], names: Sequence[str], pipe: Connection) -> None:
    """One of two processes that hold all pipelines of these names and run whichever is asked for."""
    import torch
    import torch.distributed as dist

    SETTINGS.update(settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    runs = {name: WORKER_SYSTEMS[name](rank) for name in names}
    batch = make_task().batch(BATCH)
    pipe.send("ready")
    while (name := pipe.recv()) != "stop":
        dist.barrier()
        pipe.send(timed(lambda step=runs[name]: step(batch), then=dist.barrier))
    dist.destroy_process_group()


def timed(step: Callable[[], Any], *, then: Callable[[], Any] = lambda: None) -> Seconds:
    """The seconds of one of several steps."""
    began, used = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        step()
    then()
    return (time.perf_counter() - began) / STEPS, (time.process_time() - used) / STEPS


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


def torchgpipe_worker(settings: dict[str, Any], pipe: Connection) -> None:
    """torchgpipe in a process of its own, two CPU devices."""
    import torch
    from torchgpipe import GPipe

    SETTINGS.update(settings)
    torch.set_num_threads(os.cpu_count() or 1)
    task = make_task()
    torch.manual_seed(0)
    module = task.build()
    half = len(module) // 2
    model = GPipe(
        module,
        balance=[half, len(module) - half],
        devices=["cpu", "cpu"],
        chunks=MICROBATCHES,
        checkpoint="never",
    )
    optimizer = task.optimizer(model.parameters())
    inputs, targets = task.batch(BATCH)

    def step() -> None:
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    pipe.send("ready")
    while pipe.recv() != "stop":
        pipe.send(timed(step))


def predictor(settings: dict[str, Any], pipe: Connection) -> None:
    """Seconds of a steady step by schedule, simulated from a measured profile."""
    from pipefit.simulator import simulate

    SETTINGS.update(settings)
    schedules = "1f1b", "gpipe"
    pipe.send(
        {
            f"pipefit {s}": simulate(make_plan(s, "cpu", device="cpu"), steps=2).step_seconds[-1]
            for s in schedules
        }
    )


WORKER_SYSTEMS = {
    "pipefit 1f1b": partial(pipefit_system, "1f1b", "cpu"),
    "pipefit 1f1b metered": partial(pipefit_system, "1f1b", "emulated"),
    "torch 1f1b, huge pages": torch_system,
    "pipefit gpipe": partial(pipefit_system, "gpipe", "cpu"),
    TORCH: torch_system,
}


def started(target: Callable[..., None], *args: Any, huge_pages: bool) -> Connection:
    """A process, with the words for malloc that pipefit's workers start with or without any; the pipe to it."""
    from pipefit.runtime.launch.forks import tunables

    ours, theirs = mp.Pipe()
    with mock.patch.dict(os.environ, {"GLIBC_TUNABLES": tunables("") if huge_pages else ""}):
        mp.get_context("spawn").Process(target=target, args=(*args, theirs), daemon=True).start()
    return ours


def measure(repeats: int) -> dict[str, list[Seconds]]:
    """Seconds per step of every system, repeat by repeat; CPU seconds are those of all its processes."""
    here, there = (os.path.join(tempfile.mkdtemp(), "store") for _ in range(2))
    ours = [started(worker, rank, here, SETTINGS, OURS, huge_pages=True) for rank in range(2)]
    torchs = [started(worker, rank, there, SETTINGS, (TORCH,), huge_pages=False) for rank in range(2)]
    pipes = dict.fromkeys(OURS, ours) | {TORCH: torchs}
    pipes[TORCHGPIPE] = [started(torchgpipe_worker, SETTINGS, huge_pages=False)]
    everyone = [*ours, *torchs, *pipes[TORCHGPIPE]]
    for pipe in everyone:
        pipe.recv()
    seconds: dict[str, list[Seconds]] = {name: [] for name in SYSTEMS}
    for repeat in range(repeats + 1):
        for name in SYSTEMS[repeat % len(SYSTEMS) :] + SYSTEMS[: repeat % len(SYSTEMS)]:
            for pipe in pipes[name]:
                pipe.send(name)
            clocks, used = zip(*[pipe.recv() for pipe in pipes[name]], strict=True)
            if repeat:  # the first warms up
                seconds[name].append((max(clocks), sum(used)))
    for pipe in everyone:
        pipe.send("stop")
    return seconds


def ratio(seconds: dict[str, list[Seconds]], pair: tuple[str, str], *, cpu: bool) -> float:
    """Median of the ratios repeat by repeat, of the clock's seconds or the CPU's."""
    ours, theirs = (seconds[name] for name in pair)
    return statistics.median(a[cpu] / b[cpu] for a, b in zip(ours, theirs, strict=True))


def setting(text: str) -> tuple[str, int]:
    """A setting of the model."""
    name, _, value = text.partition("=")
    return name, int(value)


def main() -> None:
    """Print the table; with `--json`, write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json")
    parser.add_argument("--set", nargs="*", type=setting, default=(), help="of the model, such as layers=2")
    options = parser.parse_args()
    SETTINGS.update(options.set)
    parameters = sum(p.numel() for p in make_task().build().parameters())
    predicted = started(predictor, SETTINGS, huge_pages=True).recv()
    seconds = measure(options.repeats)
    print(
        f"GPT, {parameters / 1e6:.1f} M parameters, 2 stages, {MICROBATCHES} microbatches, "
        f"{options.repeats} repeats of {STEPS} steps"
    )
    steps = {name: [clock for clock, _ in values] for name, values in seconds.items()}
    for name, values in seconds.items():
        print(
            f"{name:24} {statistics.median(steps[name]) * 1e3:8.1f} ms a step   "
            f"({min(steps[name]) * 1e3:.1f} - {max(steps[name]) * 1e3:.1f}), "
            f"{statistics.median(used for _, used in values) * 1e3:.1f} ms of CPUs"
        )
    ratios = {name: ratio(seconds, pair, cpu=False) for name, pair in RATIOS.items()}
    cpu_ratios = {name: ratio(seconds, pair, cpu=True) for name, pair in RATIOS.items()}
    for name, value in ratios.items():
        print(f"{name:40} {value:.3f}, of CPU seconds {cpu_ratios[name]:.3f}")
    errors = {name: value / statistics.median(steps[name]) - 1 for name, value in predicted.items()}
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
                    "seconds": steps,
                    "cpu_seconds": {name: [used for _, used in values] for name, values in seconds.items()},
                    "ratios": ratios,
                    "cpu_ratios": cpu_ratios,
                    "predicted": predicted,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
