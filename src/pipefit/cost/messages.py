"""The bytes of messages between stages: of all that a stage sends, or of the rows that one of several replicas gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from pipefit.actions import Message, Placement
from pipefit.cost.storages import StageStorages
from pipefit.plans import Plan


class Sent(NamedTuple):
    """How often a device sends every row of its slice to the stage behind it, and gradients to the one in front.

    Of several tensor-parallel ranks each serves some of those at the other end: none, where there are fewer, and then
    what they would send is freed as soon as it is made; or several, where there are more.
    """

    forward: int = 1
    backward: int = 1

    @staticmethod
    def of(plan: Plan, stage: int, shard: int) -> Sent:
        """That of the devices of a stage that hold this shard."""
        own, last = plan.stages[stage].grid.tensor, len(plan.stages) - 1
        ahead, behind = (plan.stages[other].grid.tensor for other in (max(stage - 1, 0), min(stage + 1, last)))
        return Sent(len(range(shard, behind, own)), len(range(shard, ahead, own)))


def message_sizes(plan: Plan, placement: Placement, storages: Sequence[StageStorages]) -> Callable[[Message], int]:
    """The bytes of every message between stages, which are on the devices of `placement` and have these storages."""
    division = cache(plan.division)

    def nbytes(message: Message) -> int:
        receiver, part = storages[message.receiver], message.part
        values = receiver.inputs if message.forward else receiver.outputs
        behind = message.receiver + (not message.forward)
        ends = (message.source, message.target) if message.forward else (message.target, message.source)
        stages, grids = plan.stages[behind - 1 : behind + 1], placement[behind - 1 : behind + 1]
        front, back = (
            devices.index(device) // stage.grid.tensor
            for stage, devices, device in zip(stages, grids, ends, strict=True)
        )
        rows = receiver.samples if part is None else part[1] - part[0]
        return sum(
            values[number].nbytes * (receiver.samples if dimension is None else rows) // receiver.samples
            for number, dimension in division(behind).carried(front, back)
            if message.forward or values[number].has_gradient
        )

    return nbytes
