"""What a device has under way in the background: started by one action, joined by another, for whatever travels.

Messages and collectives go through a `Transport`; all of them are started, asked for, joined and abandoned alike. What
is under way belongs to nobody else: with the join it is handed on or freed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipefit.program import Action
from pipefit.runtime.transport import Transport


class Transfers:
    """The transfers of one device."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._under_way: dict[Action, tuple[list[Tensor], Any]] = {}
        self._waiting: dict[Action, list[Tensor]] = {}

    def hand_over(self, action: Action, tensors: list[Tensor]) -> None:
        """Tensors that `action` will send, once it is its turn."""
        self._waiting[action] = tensors

    def send(self, action: Action, peer: int) -> None:
        """Begin to send what was handed over to device `peer`."""
        tensors = self._waiting.pop(action)
        self._under_way[action] = tensors, self._transport.start(action, tensors, peer)

    def receive(self, action: Action, buffers: list[Tensor], peer: int) -> None:
        """Begin to receive from device `peer` into `buffers`."""
        self._under_way[action] = buffers, self._transport.start(action, buffers, peer)

    def collect(self, action: Action, tensor: Tensor, members: tuple[int, ...]) -> None:
        """Begin to add up `tensor`, in place, over the stages `members`."""
        self._under_way[action] = [tensor], self._transport.collect(action, tensor, members)

    def ready(self, join: Action) -> bool:
        """Whether joining would return at once."""
        return self._transport.ready(self._under_way[join.start][1])

    def join(self, join: Action) -> list[Tensor]:
        """Return when the transfer is complete; what travelled."""
        tensors, handle = self._under_way.pop(join.start)
        self._transport.join(join, handle)
        return tensors

    def abandon(self) -> None:
        """Forget what is under way: a step has failed, and its messages must not reach the next one."""
        self._transport.abandon()
        self._under_way.clear()
        self._waiting.clear()
