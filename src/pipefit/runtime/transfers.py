"""The transfers of a device that run in the background: one action starts each, and another one joins it.

Messages and collectives go through a `Transport` and are handled alike. As long as a transfer runs, its tensors are
held here alone; the join returns them, so that they are freed if nobody uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pipefit.actions import Action
from pipefit.errors import UsageError
from pipefit.layer_costs import Value
from pipefit.runtime.transport import Transport
from pipefit.texts import dtype_name


class Transfers:
    """The transfers of one device."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._under_way: dict[Action, tuple[list[Tensor], Any]] = {}
        self._waiting: dict[Action, list[Tensor]] = {}

    def hand_over(self, action: Action, tensors: list[Tensor]) -> None:
        """Keep tensors that `action` will send."""
        self._waiting[action] = tensors

    def send(self, action: Action, peer: int, values: Sequence[Value]) -> None:
        """Begin to send the tensors of `action` to device `peer`, which has allocated memory for `values`.

        Raises:
            UsageError: the tensors have other shapes or dtypes.
        """
        tensors = self._waiting.pop(action)
        sent = [(tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in tensors]
        planned = [(value.shape, value.dtype) for value in values]
        if sent != planned:
            raise UsageError(
                f"{action} would send {_described(sent)}, but by the plan device {peer} allocates "
                f"{_described(planned)}: the model made other tensors than when it was profiled; profile and plan it "
                "again with such inputs"
            )
        self._under_way[action] = tensors, self._transport.start(action, tensors, peer)

    def receive(self, action: Action, buffers: list[Tensor], peer: int) -> None:
        """Begin to receive from device `peer` into `buffers`."""
        self._under_way[action] = buffers, self._transport.start(action, buffers, peer)

    def collect(self, action: Action, tensor: Tensor, members: tuple[int, ...]) -> None:
        """Begin to add up `tensor`, in place, over the stages `members`."""
        self._under_way[action] = [tensor], self._transport.collect(action, tensor, members)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is waiting to be sent, or under way."""
        under_way = [tensors for tensors, _ in self._under_way.values()]
        return [tensor for tensors in (*self._waiting.values(), *under_way) for tensor in tensors]

    def ready(self, join: Action) -> bool:
        """Whether joining would return at once."""
        return self._transport.ready(self._under_way[join.start][1])

    def join(self, join: Action) -> list[Tensor]:
        """Wait for the end of a transfer; its tensors."""
        tensors, handle = self._under_way.pop(join.start)
        self._transport.join(join, handle)
        return tensors

    def abandon(self) -> None:
        """Drop all transfers after a step has failed: its messages must not reach the next one."""
        self._transport.abandon()
        self._under_way.clear()
        self._waiting.clear()


def _described(tensors: Sequence[tuple[tuple[int, ...], str]]) -> str:
    """Shapes and dtypes, as people read them."""
    return ", ".join(f"{'x'.join(map(str, shape)) or 'one number'} of {dtype}" for shape, dtype in tensors) or "nothing"
