"""Lowering: from a plan to its program, by rewritings that each make one thing explicit.

    copied(communicated(recomputed(computes(plan))))

The schedule gives every rank an order of forwards and backwards. The first rewriting divides them into pieces and adds
second forwards for what is recomputed, the next puts receives, sends and loads around them, and the last inserts copies
of tensors to other places and back. Each is a function of the plan and of the result of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipefit.actions import Action, Kind, Subject
from pipefit.errors import UsageError
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule.communication import communicated
from pipefit.schedule.copies import Bundles, bundles_of, copied
from pipefit.schedule.gpipe import gpipe, torchgpipe
from pipefit.schedule.one_f_one_b import one_f_one_b
from pipefit.schedule.order import Compute, Order, Schedule, computes
from pipefit.schedule.recomputation import recomputed

SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b, "torchgpipe": torchgpipe}


def schedule_named(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
        UsageError: there is none; says which exist.
    """
    try:
        return SCHEDULES[name]
    except KeyError:
        raise UsageError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}") from None


def lower(plan: Plan, *, microbatches: int | None = None, update: bool = True) -> Program:
    """The program of one training step of `plan`.

    Args:
        microbatches: of a smaller last batch; the plan's unless given.
        update: False leaves the gradients where they are, to be added to by the next batch.

    Raises:
        UsageError: a decision cannot be carried out, the schedule is not for such stages, or two stages of a device
            share a parameter.
    """
    _check_shared(plan)
    count = plan.training.microbatches if microbatches is None else microbatches
    orders = recomputed(computes(plan, schedule_named(plan.training.schedule), count), plan)
    bundles = bundles_of(plan)
    ends = [list(_update(stages, plan)) if update else [] for stages in plan.ranks]
    actions = [
        [*copied(list(communicated(order, plan)), plan, bundles), *end] for order, end in zip(orders, ends, strict=True)
    ]
    return _program(plan, count, actions, bundles)


def lower_evaluation(plan: Plan, *, microbatches: int) -> Program:
    """The program that runs `microbatches` forward through all stages and keeps nothing."""

    def forwards(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Compute]:
        order = gpipe(rank, ranks, chunks, microbatches)
        return (compute._replace(kind=Kind.FORWARD_ONLY) for compute in order if compute.kind is Kind.FORWARD)

    orders: Sequence[Order] = computes(plan, forwards, microbatches)
    return _program(plan, microbatches, [list(communicated(order, plan)) for order in orders], ())


def _check_shared(plan: Plan) -> None:
    """No two stages of a device share a parameter that is trained: each would have a copy, and a sum over stages of one
    device ends in none.
    """
    for number, members in plan.summed.items():
        name = plan.measurement.shared[number].name
        for stages in plan.ranks:
            both = [stage for stage in members if stage in stages]
            if len(both) > 1:
                raise UsageError(
                    f"stages {both[0]} and {both[1]} of device {plan.stages[both[0]].device} share parameter {name!r}, "
                    "which is not supported: put all of its layers into one stage, or its stages on different devices"
                )


def _program(plan: Plan, microbatches: int, of_ranks: Sequence[list[Action]], bundles: Bundles) -> Program:
    """The program with every rank's actions on its device."""
    devices: list[tuple[Action, ...]] = [() for _ in plan.cluster.devices]
    for stages, actions in zip(plan.ranks, of_ranks, strict=True):
        devices[plan.stages[stages[0]].device] = tuple(actions)
    return Program(placement=plan.placement, microbatches=microbatches, actions=tuple(devices), bundles=bundles)


def _update(stages: Sequence[int], plan: Plan) -> Iterator[Action]:
    """The end of a rank's step: sum the gradients of parameters that other stages share, agree on them, update."""
    reduces = [
        Action(Kind.REDUCE, stage, subject=Subject(number, "shared"))
        for stage in stages
        for number, members in plan.summed.items()
        if stage in members
    ]
    yield from reduces
    yield from (reduce.join for reduce in reduces)
    if plan.training.agrees:
        yield Action(Kind.AGREE, stages[0])
        yield Action(Kind.AGREE, stages[0]).join
    yield from (Action(Kind.STEP, stage) for stage in stages)
