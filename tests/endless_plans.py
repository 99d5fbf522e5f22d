"""Plans with random decisions for endless schedules: several runs a stage, saved tensors, old weights, and state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

from movable import movable, random_place
from moving_states import moving_states
from pipefit.decisions import Decision, Microbatches, Run, SavedTensors, State, StateKind, What
from pipefit.plans import Plan


def decided(plan: Plan, rng: Random) -> Plan:
    """The plan with random decisions in every stage, all of whose shares are the same in every step.

    Those about state are drawn apart, so that all else is drawn as it is without them.
    """
    plan = replace(plan, decisions=tuple(runs(plan, rng)))
    plan = replace(plan, decisions=(*plan.decisions, *moves(plan, rng), *versions(plan, rng)))
    kinds: tuple[StateKind, ...] = ("optimizer",) if plan.measurement.shared else ("optimizer", "gradients")
    return moving_states(plan, Random(len(plan.decisions)), kinds)


def runs(plan: Plan, rng: Random) -> Iterator[Decision]:
    """In every stage up to three runs of layers that are recomputed; none parts layers that share a parameter."""
    for number, stage in enumerate(plan.stages):
        most = min(2 * rng.randint(0, 2), stage.stop - stage.start)
        edges = sorted(rng.sample(range(stage.start, stage.stop + 1), most))
        for start, stop in zip(edges[::2], edges[1::2], strict=False):
            if not plan.measurement.shared:
                run = Run(start=start, stop=stop)
                ahead = rng.choice([0, 0, 1, 2, 4])
                yield Decision(
                    stage=number, subject=run, what=What.RECOMPUTE, microbatches=share(plan, rng), ahead=ahead
                )


def moves(plan: Plan, rng: Random) -> Iterator[Decision]:
    """In every stage up to three moves of saved tensors, alone or together, to the host, to peers, or to both."""
    for number, stage in enumerate(plan.stages):
        names = movable(plan, number)
        rng.shuffle(names)
        for _ in range(rng.randint(0, 3)):
            taken, names = names[: (cut := rng.choice([1, 1, 2, 4]))], names[cut:]
            if taken:
                yield Decision(
                    stage=number,
                    subject=SavedTensors(tensors=tuple(taken)),
                    what=What.OFFLOAD,
                    place=random_place(plan, stage.device, rng),
                    microbatches=share(plan, rng),
                    behind=rng.choice([0, 1, 1, 2, 4]),
                    ahead=rng.choice([0, 0, 1, 2, 4]),
                )


def versions(plan: Plan, rng: Random) -> Iterator[Decision]:
    """In some stages that hold older weights, those of runs of layers move; where some are shared, those of all."""
    older = plan.stages[:-1] if plan.training.schedule == "pipedream" else ()
    for number, stage in enumerate(older):
        edges = [stage.start, stage.stop]
        if not plan.measurement.shared and len(range(*edges)) > 1:
            edges.insert(1, rng.randrange(stage.start + 1, stage.stop))
        for start, stop in pairwise(edges):
            if any(cost.trained_bytes for cost in plan.measurement.costs[start:stop]) and rng.random() < 0.5:
                yield Decision(
                    stage=number,
                    subject=State(start=start, stop=stop, kind="versions"),
                    what=What.OFFLOAD,
                    place=random_place(plan, stage.device, rng),
                    behind=rng.choice([0, 1, 1, 2, 4]),
                    ahead=rng.choice([0, 0, 1, 2, 4]),
                )


def share(plan: Plan, rng: Random) -> Microbatches:
    """A share of the microbatches that is the same in every step."""
    count = plan.training.microbatches
    every = rng.choice([number for number in range(1, count + 1) if count % number == 0])
    return Microbatches(rng.randint(1, every), every, rng.randrange(every))
