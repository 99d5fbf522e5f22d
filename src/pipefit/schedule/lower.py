"""Lowering: from a plan's stages and schedule to the program of every device, with communication made explicit.

The rule, for a stage's compute actions c0, c1, ...:

    post the receive of what c[t+1] needs    so that it arrives while c[t] computes
    join the receive of what c[t] needs
    load data that c[t] needs from the host
    c[t]
    join the sends that c[t-1] started       so they had the time of one compute action; before c[t] where that is
                                             the backward of what was sent, which proves that it arrived
    start the sends of what c[t] made

A device thus holds, beside its microbatches in flight, at most one posted receive and one outstanding send in each
direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipefit.errors import UsageError
from pipefit.plans import Plan
from pipefit.program import FORWARDS, Action, Kind, Program, Subject
from pipefit.schedule.gpipe import gpipe
from pipefit.schedule.one_f_one_b import one_f_one_b
from pipefit.training import Recompute

Schedule = Callable[[int, int, int], Iterator[tuple[Kind, int]]]

SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def compute_actions(
    schedule: str, stage: int, stages: int, microbatches: int, recompute: Recompute = "never"
) -> list[tuple[Kind, int]]:
    """The compute actions of one stage under the schedule of that name.

    A microbatch that is recomputed has a forward that keeps only its inputs, and another one just before its backward.

    Raises:
        UsageError: there is no schedule of that name; says which exist.
    """
    last = microbatches - 1
    found: list[tuple[Kind, int]] = []
    for kind, microbatch in _generated(schedule, stage, stages, microbatches):
        again = recompute == "always" or (recompute == "except_last" and microbatch < last)
        if again and kind is Kind.FORWARD:
            found.append((Kind.FORWARD_ONLY, microbatch))
        else:
            found += [(Kind.RECOMPUTE, microbatch)] if again and kind is Kind.BACKWARD else []
            found.append((kind, microbatch))
    return found


def _generated(schedule: str, stage: int, stages: int, microbatches: int) -> list[tuple[Kind, int]]:
    try:
        generator = SCHEDULES[schedule]
    except KeyError:
        raise UsageError(f"there is no schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}") from None
    return list(generator(stage, stages, microbatches))


def lower(plan: Plan, *, microbatches: int | None = None, update: bool = True) -> Program:
    """The program of one training step of `plan`.

    Args:
        microbatches: of a smaller last batch; the plan's unless given.
        update: False leaves the gradients where they are, to be added to by the next batch.
    """
    training = plan.training
    count = training.microbatches if microbatches is None else microbatches

    def actions(stage: int) -> Iterator[Action]:
        stages = len(plan.stages)
        computes = compute_actions(training.schedule, stage, stages, count, training.recompute)
        yield from _stage_actions(stage, stages, computes)
        if update:
            yield from _update(stage, plan.holders, agree=training.agrees)

    return _program(plan, count, actions)


def lower_evaluation(plan: Plan, *, microbatches: int) -> Program:
    """The program that runs `microbatches` forward through all stages and keeps nothing."""

    def actions(stage: int) -> Iterator[Action]:
        computes = [(Kind.FORWARD_ONLY, microbatch) for microbatch in range(microbatches)]
        yield from _stage_actions(stage, len(plan.stages), computes)

    return _program(plan, microbatches, actions)


def _program(plan: Plan, microbatches: int, actions: Callable[[int], Iterator[Action]]) -> Program:
    """Every stage's actions on its device."""
    devices: list[tuple[Action, ...]] = [() for _ in plan.cluster.devices]
    for number, stage in enumerate(plan.stages):
        devices[stage.device] = tuple(actions(number))
    placement = tuple(stage.device for stage in plan.stages)
    return Program(placement=placement, microbatches=microbatches, actions=tuple(devices))


def _stage_actions(stage: int, stages: int, computes: list[tuple[Kind, int]]) -> Iterator[Action]:
    """One stage's actions: the compute actions, each between its communication."""
    yield from _receives(computes[0], stage, stages)
    sending: list[Action] = []
    for number, (kind, microbatch) in enumerate(computes):
        if number + 1 < len(computes):
            yield from _receives(computes[number + 1], stage, stages)
        yield from (receive.join for receive in _receives((kind, microbatch), stage, stages))
        if kind in FORWARDS and stage in (0, stages - 1):
            yield Action(Kind.LOAD, stage, microbatch)
        joins = [send.join for send in sending]
        arrived = number > 0 and answers((kind, microbatch), computes[number - 1])
        sending = list(_sends((kind, microbatch), stage, stages))
        yield from joins if arrived else ()
        yield Action(kind, stage, microbatch)
        yield from () if arrived else joins
        yield from sending
    yield from (send.join for send in sending)


def _update(stage: int, holders: tuple[tuple[int, ...], ...], *, agree: bool) -> Iterator[Action]:
    """The end of a step: sum the gradients of parameters that other stages have too, agree on them, update."""
    reduces = [
        Action(Kind.REDUCE, stage, subject=Subject(number, "shared"))
        for number, stages in enumerate(holders)
        if stage in stages and len(stages) > 1
    ]
    yield from reduces
    yield from (reduce.join for reduce in reduces)
    if agree:
        yield Action(Kind.AGREE, stage)
        yield Action(Kind.AGREE, stage).join
    yield Action(Kind.STEP, stage)


def answers(compute: tuple[Kind, int], before: tuple[Kind, int]) -> bool:
    """Whether `compute` is the backward of the forward `before`."""
    return compute[0] is Kind.BACKWARD and before == (Kind.FORWARD, compute[1])


def _receives(compute: tuple[Kind, int], stage: int, stages: int) -> Iterator[Action]:
    kind, microbatch = compute
    if kind in FORWARDS and stage > 0:
        yield Action(Kind.RECV_FORWARD, stage, microbatch)
    if kind is Kind.BACKWARD and stage < stages - 1:
        yield Action(Kind.RECV_BACKWARD, stage, microbatch)


def _sends(compute: tuple[Kind, int], stage: int, stages: int) -> Iterator[Action]:
    kind, microbatch = compute
    if kind in FORWARDS and stage < stages - 1:
        yield Action(Kind.SEND_FORWARD, stage, microbatch)
    if kind is Kind.BACKWARD and stage > 0:
        yield Action(Kind.SEND_BACKWARD, stage, microbatch)
