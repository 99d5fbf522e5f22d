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
from pipefit.training import Recompute


class Situation(NamedTuple):
    """What surrounds one compute action of a stage."""

    kind: Kind  # FORWARD, FORWARD_ONLY, RECOMPUTE or BACKWARD
    in_flight: int  # other microbatches whose activations are held
    gradients: bool  # parameter gradients exist already
    receiving: Kind | None  # the next compute action, whose receive is posted
    sending: Kind | None  # the previous compute action, whose send is outstanding
    checkpoints: int = 0  # other microbatches of which the inputs alone are held
    recomputed: bool = False  # of a BACKWARD: its forward ran twice


@cache
def situations(
    schedule: str, stage: int, stages: int, microbatches: int, recompute: Recompute = "never"
) -> tuple[Situation, ...]:
    """The situations of `stage`, without those that another one of the same kind covers with more in flight."""
    computes = compute_actions(schedule, stage, stages, microbatches, recompute)
    highest: dict[Situation, Situation] = {}
    held, inputs, gradients = 0, 0, False
    for number, compute in enumerate(computes):
        kind = compute[0]
        before = computes[number - 1] if number else None
        found = Situation(
            kind,
            in_flight=held - (kind is Kind.BACKWARD),
            gradients=gradients,
            receiving=computes[number + 1][0] if number + 1 < len(computes) else None,
            sending=before[0] if before is not None and not answers(compute, before) else None,
            checkpoints=inputs - (kind is Kind.RECOMPUTE),
            recomputed=before == (Kind.RECOMPUTE, compute[1]),
        )
        alike = found._replace(in_flight=0)
        if alike not in highest or highest[alike].in_flight < found.in_flight:
            highest[alike] = found
        held += {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD: -1}.get(kind, 0)
        inputs += {Kind.FORWARD_ONLY: 1, Kind.RECOMPUTE: -1}.get(kind, 0)
        gradients = gradients or kind is Kind.BACKWARD
    return tuple(_covering(list(highest.values())))


def _covering(found: list[Situation]) -> list[Situation]:
    """Without those that another one covers: equal but for at least as many in flight and as many checkpoints."""

    def covered(one: Situation) -> bool:
        return any(
            other is not one
            and other._replace(in_flight=0, checkpoints=0) == one._replace(in_flight=0, checkpoints=0)
            and other.in_flight >= one.in_flight
            and other.checkpoints >= one.checkpoints
            for other in found
        )

    return [one for one in found if not covered(one)]
