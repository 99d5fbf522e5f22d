"""Random training runs of real models, and the three accounts of their memory: allocator, dry run, simulator.

Shared by the tests of accuracy and the benchmark of accuracy. A case is drawn from a `Random` and from nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from oracle import measured_peaks
from pipefit.capture import Task
from pipefit.cluster import Cluster
from pipefit.plans import Grid, Plan, Stage
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.runtime import certify
from pipefit.simulator import simulate
from pipefit.training import Training
from pipefit.zoo import build

MODELS = ("mlp", "gpt", "bert", "vgg11")
SCHEDULES = ("gpipe", "1f1b")
STEPS = 2  # the first, in which optimizer state is born, and a steady one
ROOM = 1 << 34


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task, a plan for it, and the words that tell this case from others."""

    name: str
    settings: Mapping[str, Any]
    task: Task
    plan: Plan

    def __str__(self) -> str:
        training = self.plan.training
        settings = " ".join(f"{key}={value}" for key, value in self.settings.items())
        split = "-".join(map(str, self.plan.split))
        return f"{self.name} {settings} {training.microbatches}x{training.microbatch_size} {training.schedule} {split}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The highest bytes of one device in one step, three times over."""

    case: Case
    device: int
    step: int
    oracle_bytes: int
    dry_run_bytes: int
    simulated_bytes: int

    @property
    def dry_run_difference(self) -> int:
        """Bytes by which the dry run is off."""
        return self.dry_run_bytes - self.oracle_bytes

    @property
    def simulator_error(self) -> float:
        """The share by which the simulator is off, with its sign."""
        return self.simulated_bytes / self.oracle_bytes - 1


def random_case(rng: Random, *, model: str | None = None) -> Case:
    """A model of the zoo (`model`, or any) of small size, some training settings, and some plan."""
    name = model or rng.choice(MODELS)
    settings = {**_settings(name, rng), "optimizer": rng.choice(["sgd", "adam", "adamw"])}
    return plan_for(build(name, **settings), rng, name=name, settings=settings)


def plan_for(task: Task, rng: Random, *, name: str = "", settings: Mapping[str, Any] | None = None) -> Case:
    """Any plan of up to four stages for `task`, on devices in any order."""
    found = profile(task, microbatch_size=rng.choice([1, 2, 3, 4]))
    return Case(name=name or task.name, settings=settings or {}, task=task, plan=random_plan(found, rng))


def random_plan(found: ModelProfile, rng: Random, *, microbatches: int | None = None) -> Plan:
    """Any split of the layers over up to four devices, under any schedule, for one to six `microbatches`."""
    layers, size = len(found.layers), found.measurements[0].microbatch_size
    count = rng.randint(1, min(4, layers))
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    devices = rng.sample(range(4), count)
    number = microbatches or rng.choice([1, 2, 3, 4, 6])
    return Plan(
        profile=found,
        cluster=Cluster.emulated((4, ROOM)),
        training=Training(batch_size=size * number, microbatches=number, schedule=rng.choice(SCHEDULES)),
        stages=tuple(
            Stage(start=start, stop=stop, grid=Grid.of(device))
            for (start, stop), device in zip(itertools.pairwise(cuts), devices, strict=True)
        ),
    )


def accounts(case: Case) -> Iterator[Account]:
    """Every device that holds a stage, in every step."""
    dry, virtual = certify(case.task, case.plan, steps=STEPS), simulate(case.plan, steps=STEPS)
    measured = measured_peaks(case.task, case.plan, steps=STEPS)
    for stage, step in itertools.product(range(len(case.plan.stages)), range(STEPS)):
        device = case.plan.stages[stage].device
        yield Account(
            case=case,
            device=device,
            step=step,
            oracle_bytes=measured[stage][step],
            dry_run_bytes=dry.devices[device].step_peak_bytes(step),
            simulated_bytes=virtual.devices[device].step_peak_bytes(step),
        )


def _settings(model: str, rng: Random) -> dict[str, Any]:
    """Settings of a small model, drawn one by one."""
    dropout = rng.choice([0.0, 0.1])
    if model == "mlp":
        widths = tuple(rng.choice([16, 64, 200, 512, 1024]) for _ in range(rng.randint(2, 7)))
        return {"widths": widths, "activation": rng.choice(["relu", "gelu", "tanh"]), "dropout": dropout}
    if model == "vgg11":
        sizes = {"width": rng.choice([3, 4, 8]), "image_size": rng.choice([32, 48, 64]), "num_classes": 10}
        return {**sizes, "inplace": rng.random() < 0.7, "dropout": dropout}
    settings = {
        "layers": rng.randint(1, 4),
        "hidden": rng.choice([32, 64, 96]),
        "heads": rng.choice([2, 4]),
        "vocabulary": rng.choice([64, 256, 1000]),
        "sequence": rng.choice([16, 40, 64, 128]),
        "dropout": dropout,
        "attention": rng.choice(["sdpa", "eager"]),
    }
    return settings | ({"mask": rng.random() < 0.5} if model == "bert" else {})
