"""Which links training waits for: two devices have both begun a message, and it does not come to its end.

A worker that waits in silence may wait for another that computes, which is nobody's fault, or for one that hangs,
which is found at its own action. Where all who take part in a message or a sum have begun it, what is left is the link
between them, or a process that stands still in the middle of it. A supervisor knows that from the actions that workers
are at.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from pipefit.actions import COLLECTIVE, MESSAGES, Action, collective, message_of
from pipefit.cost.communicators import members
from pipefit.plans import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a worker is: at action `number` of its `actions` in a step; at none of them where `number` is negative."""

    step: int
    number: int
    actions: Sequence[Action]


def waited_for(plan: Plan, device: int, positions: Mapping[int, Position]) -> tuple[int, ...]:
    """The devices with which `device` shares a message or sum that it waits for and that all of them have begun.

    Empty where it waits for no such thing, or somebody has not come to it yet. `positions` are by device.
    """
    here = positions[device]
    if not 0 <= here.number < len(here.actions) or not here.actions[here.number].wait:
        return ()
    awaited, ends = _exchange(plan, device, here.actions[here.number])
    others = tuple(end for end in ends if end != device)
    return others if all(_has_begun(plan, end, positions[end], here.step, awaited) for end in others) else ()


def _exchange(plan: Plan, device: int, action: Action) -> tuple[Hashable, tuple[int, ...]]:
    """A key of the message or sum that an action belongs to, the same for all who take part; and these."""
    if action.kind in MESSAGES:
        message = message_of(device, action, plan.placement)
        return message, (message.source, message.target)
    if action.kind in COLLECTIVE:
        return (collective(action), action.microbatch), members(plan, action)
    return None, ()


def _has_begun(plan: Plan, device: int, there: Position, step: int, awaited: Hashable) -> bool:
    if there.step != step:
        return there.step > step and there.number >= 0
    begun = there.actions[: max(there.number, 0)]
    return any(_exchange(plan, device, action)[0] == awaited for action in begun if not action.wait)
