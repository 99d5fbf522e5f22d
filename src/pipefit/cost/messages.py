"""The bytes of messages between stages: of all that a stage sends, or of the rows that one of several replicas gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from pipefit.actions import Message, Placement
from pipefit.cost.storages import StageStorages
from pipefit.plans import Plan


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
