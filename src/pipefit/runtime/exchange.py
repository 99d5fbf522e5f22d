"""What a device exchanges with the stages next to its own: which tensors, and which of their rows.

A message carries all that a stage sends, or, between stages with replicas, the rows that both ends have. All parts of a
value are sent out of one tensor and received into one, so that nothing is copied for them: rows lie one after the
other in memory. Of several tensor shards at the other end each gets the same rows. Values without samples come in one
of the messages, whole; gradients of those that went to nobody are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipefit.actions import SENDS, Action, Kind, Message, message_of
from pipefit.layer_costs import Value
from pipefit.plans import Plan
from pipefit.rows import Rows
from pipefit.runtime.transfers import Part, Transfers

_FORWARD = frozenset({Kind.SEND_FORWARD, Kind.RECV_FORWARD})


class Boundary(NamedTuple):
    """The values at one end of a stage, in a slice of so many samples."""

    values: Sequence[Value]
    samples: int


class Exchange:
    """The messages of one device of `plan`."""

    def __init__(self, plan: Plan, device: int, transfers: Transfers) -> None:
        self._plan, self._device, self._transfers = plan, device, transfers
        self._division = cache(plan.division)

    def hand_over(self, action: Action, tensors: list[Tensor]) -> None:
        """Keep tensors that `action` will send, unless it is another shard of the replica that sends them."""
        if self._times(action):
            self._transfers.hand_over(action, tensors)

    def send(self, action: Action, boundary: Boundary) -> None:
        """Begin to send what has been handed over for `action`, or its rows of that."""
        message = message_of(self._device, action, self._plan.placement)
        values = [value for value in boundary.values if action.kind in _FORWARD or value.has_gradient]
        self._transfers.send(action, message, values, self._part(action, message, boundary))

    def receive(self, action: Action, boundary: Boundary, device: torch.device) -> None:
        """Begin to receive; the first message of several allocates memory on `device` for all that they bring."""
        message = message_of(self._device, action, self._plan.placement)
        self._transfers.receive(
            action,
            message,
            lambda: self._buffers(action, message, boundary, device),
            self._part(action, message, boundary),
        )

    def _buffers(self, action: Action, message: Message, boundary: Boundary, device: torch.device) -> list[Tensor]:
        """Memory for what comes; gradients that may come in no message are zero."""
        forward, division = action.kind in _FORWARD, self._division(_behind(message))
        surely = forward or division.front == division.behind
        return [
            (torch.empty if surely or dimension is not None else torch.zeros)(
                value.shape, dtype=getattr(torch, value.dtype), device=device
            )
            for value, dimension in zip(boundary.values, division.dimensions, strict=True)
            if forward or value.has_gradient
        ]

    def _part(self, action: Action, message: Message, boundary: Boundary) -> Part | None:
        """What of the tensors at the boundary the message carries; None for all of them."""
        if action.part is None:
            return None
        behind = _behind(message)
        ends = (message.source, message.target) if message.forward else (message.target, message.source)
        front, back = (self._replica(behind - 1, ends[0]), self._replica(behind, ends[1]))
        carried = self._division(behind).carried(front, back)
        if action.kind not in _FORWARD:
            carried = _among([value.has_gradient for value in boundary.values], carried)
        first = self._replica(action.stage, self._device) * boundary.samples
        rows: Rows = (action.part[0] - first, action.part[1] - first)
        return Part(tuple(carried), rows, boundary.samples * self._times(action))

    def _times(self, action: Action) -> int:
        """How often this device sends every row of its replica, or receives it, which is once."""
        own, there = (self._plan.stages[stage].grid for stage in (action.stage, action.neighbour))
        return len(range(own.shard_of(self._device), there.tensor, own.tensor)) if action.kind in SENDS else 1

    def _replica(self, stage: int, device: int) -> int:
        return self._plan.stages[stage].grid.replica_of(device)


def _behind(message: Message) -> int:
    """The stage behind the boundary that a message crosses."""
    return message.receiver if message.forward else message.receiver + 1


def _among(wanted: Sequence[bool], carried: Sequence[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Those of `carried` that are wanted, numbered among the wanted ones."""
    return [(sum(wanted[:number]), dimension) for number, dimension in carried if wanted[number]]
