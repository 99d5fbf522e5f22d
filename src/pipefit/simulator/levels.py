"""Bytes by category while a device runs its program: at the peak of every action, and between actions."""

from __future__ import annotations

from collections.abc import Iterable

from pipefit.cost.effects import Effect
from pipefit.cost.rest import StageRest
from pipefit.cost.states import Away

Levels = tuple[int, int, int, int, int, int, int, int, int]  # bytes by category, in the order of CATEGORIES

Change = tuple[int, int, Effect]  # an effect, after its training step and its position in the program

Row = tuple[float, int, str, Levels]  # an action's peak: seconds, step, text, bytes

NOTHING_AWAY = Away(0, 0)


def at_rest(stages: Iterable[StageRest], lent_bytes: int, away: Away = NOTHING_AWAY) -> Levels:
    """What a device holds before the first step.

    Parameters and buffers, optimizer state that exists before the first update, without what is `away` of these; the
    memory in which the losses are summed, and the arenas that it lends.
    """
    rests = list(stages)
    parameters = sum(rest.parameter_bytes for rest in rests) - away.parameters
    early = sum(rest.early_state_bytes for rest in rests) - away.optimizer
    return parameters, 0, early, 0, 0, sum(rest.loss_bytes for rest in rests), lent_bytes, 0, 0


def highest(rest: Levels, changes: Iterable[Change]) -> int:
    """The peak: the most bytes of all categories together."""
    level = top = sum(rest)
    for _, _, (peak_bytes, after_bytes, _, _) in changes:
        top = max(top, level + peak_bytes)
        level += after_bytes
    return top


def peaks(rest: Levels, changes: Iterable[Change]) -> list[Levels]:
    """The bytes by category at the peak of every action."""
    parameters, gradients, optimizer, activations, versions, boundary, lent, *_ = rest
    found = []
    for _, _, (_, _, peak, after) in changes:
        found.append(
            (
                parameters + peak[5],
                gradients + peak[0],
                optimizer + peak[1],
                activations + peak[2],
                versions + peak[3],
                boundary + peak[4],
                lent,
                peak[6],
                peak[7],
            )
        )
        gradients += after[0]
        optimizer += after[1]
        activations += after[2]
        versions += after[3]
        boundary += after[4]
        parameters += after[5]
    return found
