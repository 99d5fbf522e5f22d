"""Random training runs of real models, and three accounts of their memory: allocator, dry run, simulator.

Used by the tests and the benchmark of accuracy. A case depends only on its `Random`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from pipefit.capture import Task
from pipefit.lowering.passes.recomputation import RECOMPUTE, recompute_decisions
from pipefit.models import build
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Microbatches, Run, What
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.small_tasks import profile_of

MODELS = ("mlp", "gpt", "bert", "vgg11")
SCHEDULES = ("gpipe", "torchgpipe", "1f1b")
STEPS = 2  # the first, in which optimizer state is born, and a steady one
ROOM = 1 << 34


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A task, a plan for it, and words that identify the case."""

    name: str
    settings: Mapping[str, Any]
    task: Task
    plan: Plan

    def __str__(self) -> str:
        training = self.plan.training
        settings = " ".join(f"{key}={value}" for key, value in self.settings.items())
        split = "-".join(map(str, self.plan.split))
        batch = f"{training.microbatches}x{training.microbatch_size}"
        devices = (
            "" if len(self.plan.ranks) == len(self.plan.stages) else f" on {len(self.plan.ranks)} devices"
        )
        decisions = "".join(
            f"; {one} of microbatches {tuple(one.microbatches)}" for one in self.plan.decisions
        )
        return f"{self.name} {settings} {batch} {training.schedule} {split}{devices}{decisions}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Peak bytes of one device in one step by allocator, dry run and simulator."""

    case: Case
    device: int
    step: int
    oracle_bytes: int
    dry_run_bytes: int
    simulated_bytes: int

    @property
    def dry_run_difference(self) -> int:
        """Error of the dry run in bytes."""
        return self.dry_run_bytes - self.oracle_bytes

    @property
    def simulator_error(self) -> float:
        """Signed relative error of the simulator."""
        return self.simulated_bytes / self.oracle_bytes - 1


def random_case(rng: Random, *, model: str | None = None) -> Case:
    """Draw a small model of the zoo (`model`, or any), training settings, and a plan."""
    name, settings = random_model(rng, model=model)
    return plan_for(build(name, **settings), rng, name=name, settings=settings)


def random_model(rng: Random, *, model: str | None = None) -> tuple[str, dict[str, Any]]:
    """Draw a small model of the zoo (`model`, or any), and settings for it and its optimizer."""
    name = model or rng.choice(MODELS)
    return name, {**_settings(name, rng), "optimizer": rng.choice(["sgd", "adam", "adamw"])}


def plan_for(task: Task, rng: Random, *, name: str = "", settings: Mapping[str, Any] | None = None) -> Case:
    """Draw any plan for `task`, for this process's number of threads."""
    found = profile_of(task, rng.choice([1, 2, 3, 4]))
    return Case(name=name or task.name, settings=settings or {}, task=task, plan=random_plan(found, rng))


def random_plan(
    found: ModelProfile, rng: Random, *, microbatches: int | None = None, schedule: str | None = None
) -> Plan:
    """Draw any split of the layers over up to four devices in any order, under any `schedule`, for one to six
    `microbatches`, with any recomputation. Under GPipe's schedules devices may hold several stages.
    """
    layers, size = len(found.layers), found.measurements[0].microbatch_size
    schedule = schedule or rng.choice(SCHEDULES)
    number = microbatches or rng.choice([1, 2, 3, 4, 6])
    ranks = rng.randint(1, min(4, layers))
    chunks = 1 if schedule.endswith("1f1b") else rng.choice([1, 1, 2, 3])
    chunks = chunks if ranks * chunks <= layers else 1
    cuts = [0, *sorted(rng.sample(range(1, layers), ranks * chunks - 1)), layers]
    devices = rng.sample(range(4), ranks)
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(devices[stage % ranks]))
        for stage, (start, stop) in enumerate(itertools.pairwise(cuts))
    )
    if not _holds_copies_apart(found, stages):  # two copies of a parameter on one device are refused
        stages = (*stages[: ranks - 1], replace(stages[ranks - 1], stop=layers))
    plan = Plan(
        profile=found,
        cluster=Cluster.emulated((4, ROOM)),
        training=Training(
            batch_size=size * number,
            microbatches=number,
            schedule=schedule,
            precision=found.assumptions.precision,
        ),
        stages=stages,
    )
    return replace(plan, decisions=random_decisions(plan, rng))


def random_decisions(plan: Plan, rng: Random) -> tuple[Decision, ...]:
    """Draw nothing, whole stages, or in some stages a run of layers for some microbatches, early or just in
    time.
    """
    if rng.random() < 0.5:
        return recompute_decisions(
            plan.stages,
            plan.profile.edges,
            rng.choice(RECOMPUTE),
            plan.training.schedule,
            plan.training.microbatches,
        )
    runs = []
    for number, stage in enumerate(plan.stages):
        start, stop = sorted(rng.sample(range(stage.start, stage.stop + 1), 2))
        if rng.random() < 0.3 or cuts_a_shared_parameter(plan, stage, start, stop):
            continue
        every = rng.randint(1, 3)
        which = Microbatches(taken=rng.randint(1, every), every=every, first=rng.randrange(every))
        subject = Run(start=start, stop=stop)
        ahead = rng.choice([0, 0, 1, 2])
        runs.append(
            Decision(stage=number, subject=subject, what=What.RECOMPUTE, microbatches=which, ahead=ahead)
        )
    return tuple(runs)


def cuts_a_shared_parameter(plan: Plan, stage: Stage, start: int, stop: int) -> bool:
    """Return whether recomputing layers `start` to `stop - 1` splits users of one parameter into two pieces
    of the stage.
    """
    pieces = ((stage.start, start), (start, stop), (stop, stage.stop))
    return any(
        sum(any(a <= user < b for user in one.users) for a, b in pieces) > 1
        for one in plan.measurement.shared
    )


def _holds_copies_apart(found: ModelProfile, stages: tuple[Stage, ...]) -> bool:
    """Return whether no device has two stages that share a parameter."""
    for shared in found.measurements[0].shared:
        holders = [
            stage.device for stage in stages if any(stage.start <= user < stage.stop for user in shared.users)
        ]
        if len(set(holders)) != len(holders):
            return False
    return True


def accounts(case: Case) -> Iterator[Account]:
    """Return the accounts of every used device in every step."""
    dry, virtual = certify(case.task, case.plan, steps=STEPS), simulate(case.plan, steps=STEPS)
    measured = measured_peaks(case.task, case.plan, steps=STEPS)
    for (rank, stages), step in itertools.product(enumerate(case.plan.ranks), range(STEPS)):
        device = case.plan.stages[stages[0]].device
        yield Account(
            case=case,
            device=device,
            step=step,
            oracle_bytes=measured[rank][step],
            dry_run_bytes=dry.devices[device].step_peak_bytes(step),
            simulated_bytes=virtual.devices[device].step_peak_bytes(step),
        )


def _settings(model: str, rng: Random) -> dict[str, Any]:
    """Draw the settings of a small model one by one."""
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
