"""The storages that the saved tensors of a stage live in, and who needs them until when.

Several saved tensors may share one storage: what one layer returns, the next one saves. Moving one of them away moves
the storage, so it must not be in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.cost.memory import StageMemory
from pipefit.profiles import LayerCost, Origin


class Storage:
    """One storage of one microbatch in a stage. Compared by identity."""

    __slots__ = ("last_reader", "nbytes", "savers", "sent")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.savers: list[int] = []  # layers that save it, in order
        self.last_reader = -1  # the last layer whose forward takes it
        self.sent = False  # it is an output of the stage


def saved_storages(memory: StageMemory) -> dict[tuple[int, int], Storage]:
    """The storage of every saved tensor of a stage, by layer and number; parameters and constants are not there.

    The loss counts as part of the last layer.
    """
    found: dict[tuple[int, int], Storage] = {}
    values = [Storage(value.nbytes) for value in memory.inputs]
    for number, cost in enumerate(memory.layers):
        layer = min(memory.start + number, memory.stop - 1)
        is_loss = memory.start + number == memory.stop
        values += [Storage(value.nbytes) for value in memory.targets] if is_loss else []
        own = [Storage(nbytes) for nbytes in cost.storages]
        for index, storage in _saved(cost, own, values):
            storage.savers.append(layer)
            if not is_loss:
                found[layer, index] = storage
        for storage in values:
            storage.last_reader = layer
        values = [_of(origin, own, values) or Storage(0) for origin in cost.output_origins]
    for storage in values:
        storage.sent = not memory.last
    return found


def _saved(cost: LayerCost, own: Sequence[Storage], inputs: Sequence[Storage]) -> list[tuple[int, Storage]]:
    pairs = ((tensor.index, _of(tensor.origin, own, inputs)) for tensor in cost.saved)
    return [(index, storage) for index, storage in pairs if storage is not None]


def _of(origin: Origin, own: Sequence[Storage], inputs: Sequence[Storage]) -> Storage | None:
    match origin.kind:
        case "own":
            return own[origin.index]
        case "input":
            return inputs[origin.index]
        case _:
            return None
