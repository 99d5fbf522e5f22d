"""The distinct memory situations a stage meets in a step, however many microbatches there are.

What a device holds during a compute action depends on few things: which microbatches' activations are kept, whether
gradients exist, what is being sent and which receive is posted. A stage of a 1F1B schedule with a thousand microbatches
meets about eight different combinations. Planners evaluate those instead of the program: same peak, no simulation.
(`tests/schedule` holds the two equal.)
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from pipefit.program import Kind
from pipefit.schedule.lower import answers, compute_actions


class Situation(NamedTuple):
    """What surrounds one compute action of a stage."""

    kind: Kind  # FORWARD or BACKWARD
    in_flight: int  # other microbatches whose activations are held
    gradients: bool  # parameter gradients exist already
    receiving: Kind | None  # the next compute action, whose receive is posted
    sending: Kind | None  # the previous compute action, whose send is outstanding


@cache
def situations(schedule: str, stage: int, stages: int, microbatches: int) -> tuple[Situation, ...]:
    """The situations of `stage`, without those that another one of the same kind covers with more microbatches in
    flight.
    """
    computes = compute_actions(schedule, stage, stages, microbatches)
    highest: dict[tuple[Kind, bool, Kind | None, Kind | None], int] = {}
    held, backwards = 0, 0
    for number, compute in enumerate(computes):
        kind = compute[0]
        after = computes[number + 1][0] if number + 1 < len(computes) else None
        before = computes[number - 1][0] if number and not answers(compute, computes[number - 1]) else None
        others = held - (kind is Kind.BACKWARD)
        key = (kind, backwards > 0, after, before)
        highest[key] = max(highest.get(key, 0), others)
        held += 1 if kind is Kind.FORWARD else -1
        backwards += kind is Kind.BACKWARD
    return tuple(
        Situation(kind, others, gradients, after, before)
        for (kind, gradients, after, before), others in highest.items()
    )
