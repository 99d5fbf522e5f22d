"""Bytes by category over a device's program: at the highest moment of every action, and between actions."""

from __future__ import annotations

from collections.abc import Iterable

from pipefit.cost.memory import StageMemory
from pipefit.simulator.effects import Effect
from pipefit.trace import CATEGORIES, Category

Levels = tuple[int, int, int, int, int, int, int, int]  # bytes by category, in the order of CATEGORIES

_LENT = CATEGORIES.index(Category.LENT)

Step = tuple[int, int, Effect]  # an effect with its step and its position in the program

Row = tuple[
    float, int, int, int, Levels
]  # an action's highest bytes: seconds, step, device, position in its program, bytes


def at_rest(stages: Iterable[StageMemory]) -> Levels:
    """What a device holds before it does anything: parameters and buffers, early state, the buffers of the losses."""
    memories = list(stages)
    parameters = sum(memory.parameter_bytes for memory in memories)
    early = sum(memory.early_state_bytes for memory in memories)
    return parameters, 0, early, 0, 0, sum(memory.loss_bytes for memory in memories), 0, 0


def highest(rest: Levels, steps: Iterable[Step]) -> int:
    """The most bytes in all."""
    level = top = sum(rest)
    for _, _, (peak_bytes, after_bytes, _, _) in steps:
        top = max(top, level + peak_bytes)
        level += after_bytes
    return top


def peaks(rest: Levels, steps: Iterable[Step]) -> list[Levels]:
    """The bytes by category at the highest moment of every action."""
    parameters, gradients, optimizer, activations, _, boundary, _, _ = rest
    found = []
    for _, _, (_, _, peak, after) in steps:
        found.append(
            (
                parameters,
                gradients + peak[0],
                optimizer + peak[1],
                activations + peak[2],
                0,
                boundary + peak[3],
                0,
                peak[4],
            )
        )
        gradients += after[0]
        optimizer += after[1]
        activations += after[2]
        boundary += after[3]
    return found


def rests(rest: Levels, steps: Iterable[Step]) -> list[Levels]:
    """The bytes by category before the first action and after every one."""
    found = [rest]
    for _, _, (_, _, _, (gradients, optimizer, activations, boundary)) in steps:
        before = found[-1]
        found.append(
            (
                before[0],
                before[1] + gradients,
                before[2] + optimizer,
                before[3] + activations,
                0,
                before[5] + boundary,
                0,
                0,
            )
        )
    return found


def lending(levels: Levels, nbytes: int) -> Levels:
    """`levels` of a device that lends `nbytes` besides."""
    return (*levels[:_LENT], nbytes, *levels[_LENT + 1 :])  # type: ignore[return-value]  # as many as before
