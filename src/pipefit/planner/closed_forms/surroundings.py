"""Surroundings: what else is in memory during a compute action. A stage meets only a few different ones in a step.

What a device holds beside the action's own bytes depends on how many other microbatches are in flight, whether
gradients exist, what is being sent, and which receive has started. A stage of a 1F1B schedule meets about eight
combinations of these, even with a thousand microbatches. Planners compute the peak of each, instead of simulating the
program: the highest of them is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from pipefit.actions import Action, Kind
from pipefit.schedule import schedule_named
from pipefit.schedule.communication import is_backward_of
from pipefit.schedule.whole_stages import Recompute, recomputed_microbatches


class Surroundings(NamedTuple):
    """What surrounds one compute action of a stage."""

    kind: Kind  # FORWARD, FORWARD_ONLY, RECOMPUTE or BACKWARD
    in_flight: int  # other microbatches whose activations are held
    gradients: bool  # parameter gradients exist already
    receiving: Kind | None  # the next compute action, whose receive has started
    sending: Kind | None  # the previous compute action, whose send has not been joined
    checkpoints: int = 0  # other microbatches of which the inputs alone are held
    recomputed: bool = False  # a BACKWARD whose forward ran twice


@cache
def surroundings(
    schedule: str, stage: int, stages: int, microbatches: int, recompute: Recompute = "never"
) -> tuple[Surroundings, ...]:
    """Those of `stage`, without any that others with more in flight make superfluous."""
    computes = whole_stage_order(schedule, stage, stages, microbatches, recompute)
    highest: dict[Surroundings, Surroundings] = {}
    held, inputs, gradients = 0, 0, False
    for number, compute in enumerate(computes):
        kind = compute.kind
        before = computes[number - 1] if number else None
        found = Surroundings(
            kind,
            in_flight=held - (kind is Kind.BACKWARD),
            gradients=gradients,
            receiving=computes[number + 1].kind if number + 1 < len(computes) else None,
            sending=before.kind if before is not None and not is_backward_of(compute, before) else None,
            checkpoints=inputs - (kind is Kind.RECOMPUTE),
            recomputed=before is not None and (before.kind, before.microbatch) == (Kind.RECOMPUTE, compute.microbatch),
        )
        alike = found._replace(in_flight=0)
        if alike not in highest or highest[alike].in_flight < found.in_flight:
            highest[alike] = found
        held += {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD: -1}.get(kind, 0)
        inputs += {Kind.FORWARD_ONLY: 1, Kind.RECOMPUTE: -1}.get(kind, 0)
        gradients = gradients or kind is Kind.BACKWARD
    return tuple(_covering(highest.values()))


def whole_stage_order(schedule: str, stage: int, stages: int, microbatches: int, recompute: Recompute) -> list[Action]:
    """The compute actions of a stage on a device of its own, recomputed as a whole or not at all."""
    again = recomputed_microbatches(recompute, schedule, microbatches) or ()
    found: list[Action] = []
    for compute in schedule_named(schedule)(stage, stages, 1, microbatches):
        twice, action = compute.microbatch in again, Action(*compute)
        if twice and compute.kind is Kind.BACKWARD:
            found.append(action._replace(kind=Kind.RECOMPUTE))
        found.append(action._replace(kind=Kind.FORWARD_ONLY) if twice and compute.kind is Kind.FORWARD else action)
    return found


def _covering(found: Iterable[Surroundings]) -> Iterator[Surroundings]:
    """Without those that another one covers: equal but for at least as many in flight and as many checkpoints."""
    groups: dict[Surroundings, list[Surroundings]] = {}
    for one in found:
        groups.setdefault(one._replace(in_flight=0, checkpoints=0), []).append(one)
    for group in groups.values():
        most = -1
        for one in sorted(group, key=lambda s: (s.in_flight, s.checkpoints), reverse=True):
            if one.checkpoints > most:
                most = one.checkpoints
                yield one
