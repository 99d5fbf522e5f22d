"""What a device's ledger tells of the first steps of its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipefit.actions import Action
from pipefit.cost.stage import StageCost
from pipefit.cost.states import Away
from pipefit.program import UncheckedProgram
from pipefit.simulator.ledger import Effects, Ledger


class Reading(NamedTuple):
    """The effects of the steps that differ, the actions of the last that name a place, and what is away before the
    first step.
    """

    effects: list[Effects]
    placed: list[Action]
    away: Away


def reading(
    device: int, stages: Mapping[int, StageCost], programs: Sequence[UncheckedProgram], *, steps: int, distinct: int
) -> Reading:
    """The reading of a device with these stages for `steps` steps, of which no more than `distinct` differ.

    The last of the programs repeats.

    Raises:
        UsageError: an action uses what does not exist then.
    """
    endless = programs[-1].endless
    ledger = Ledger(device, stages, programs[-1])
    found, away = list[Effects](), ledger.away
    before: object = None
    for step in range(min(steps, distinct)):
        before = ledger.state if endless else None
        actions = programs[min(step, len(programs) - 1)].actions[device]
        found.append(ledger.read_again(actions, found[-1]) if found else ledger.read(actions))
    settled = not endless or steps < distinct
    assert settled or before == ledger.state, "the last step that differs leaves what it found"
    return Reading(found, ledger.placed, away)
