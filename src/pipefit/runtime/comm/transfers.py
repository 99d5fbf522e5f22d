"""Background transfers of a device: one action starts each, and another one joins it.

Messages and collectives go through a `Transport` and are treated equally. During a transfer, its tensors are
held here only; the join returns them, so that unused ones are freed. Tensors that are sent in several
messages, some rows in each, are held until the last of them is joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pipefit.errors import UsageError
from pipefit.runtime.comm.transport import Owners, Transport
from pipefit.schema.actions import Action, Message
from pipefit.schema.grids import Rows
from pipefit.schema.layer_costs import Value
from pipefit.texts import dtype_name


class MessagePart(NamedTuple):
    """One of several messages' part of a stage's tensors.

    `carried` are the tensors' numbers, each with the dimension of the `rows`; None for a whole tensor. All of
    these messages together have `samples` rows.
    """

    carried: tuple[tuple[int, int | None], ...]
    rows: Rows
    samples: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.rows[1] - self.rows[0]

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the part of the tensors, as views."""
        return [
            tensors[number]
            if dimension is None
            else tensors[number].narrow(dimension, self.rows[0], self.length)
            for number, dimension in self.carried
        ]


@dataclass(slots=True)
class _StageTensors:
    """The tensors of all messages of one kind about one microbatch of a stage.

    `left` counts the rows not yet joined.
    """

    tensors: list[Tensor]
    left: int


class Transfers:
    """The transfers of one device."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._under_way: dict[Action, tuple[list[Tensor], Any, int]] = {}  # the tensors, a handle, the rows
        self._waiting: dict[Action, list[Tensor]] = {}
        self._whole: dict[Action, _StageTensors] = {}

    def hand_over(self, action: Action, tensors: list[Tensor]) -> None:
        """Keep tensors that `action`, or its variants for some of the rows each, will send."""
        self._waiting[_name(action)] = tensors

    def send(
        self, action: Action, message: Message, values: Sequence[Value], part: MessagePart | None = None
    ) -> None:
        """Begin to send the tensors of `action`, or a part of them.

        The receiver has allocated memory for `values`.

        Raises:
            UsageError: the tensors have other shapes or dtypes.
        """
        name = _name(action)
        if name in self._waiting:
            tensors = self._waiting.pop(name)
            _check_planned(action, message.target, tensors, values)
            self._whole[name] = _StageTensors(tensors, 1 if part is None else part.samples)
        self._start(action, message, part)

    def receive(
        self,
        action: Action,
        message: Message,
        buffers: Callable[[], list[Tensor]],
        part: MessagePart | None = None,
    ) -> None:
        """Begin to receive, all or a part. `buffers` allocates memory at the first part, for all parts."""
        name = _name(action)
        if name not in self._whole:
            self._whole[name] = _StageTensors(buffers(), 1 if part is None else part.samples)
        self._start(action, message, part)

    def _start(self, action: Action, message: Message, part: MessagePart | None) -> None:
        whole = self._whole[_name(action)].tensors
        tensors, rows = (whole, 1) if part is None else (part.of(whole), part.length)
        self._under_way[action] = tensors, self._transport.start(action, tensors, message), rows

    def collect(
        self, action: Action, tensors: list[Tensor], members: tuple[int, ...], device: int, owners: Owners
    ) -> None:
        """Begin a collective of the devices `members`, including this `device`, as a `Transport` does."""
        self._whole[_name(action)] = _StageTensors(tensors, 1)
        self._under_way[action] = (
            tensors,
            self._transport.collect(action, tensors, members, device, owners),
            1,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that wait to be sent, or are in transfer."""
        whole = [whole.tensors for whole in self._whole.values()]
        return [tensor for tensors in (*self._waiting.values(), *whole) for tensor in tensors]

    def ready(self, join: Action) -> bool:
        """Return whether joining would return at once."""
        return self._transport.ready(self._under_way[join.start][1])

    def join(self, join: Action) -> list[Tensor] | None:
        """Wait for the end of a transfer.

        Return its tensors, or None while other parts of them are in transfer.
        """
        tensors, handle, rows = self._under_way.pop(join.start)
        self._transport.join(join, handle)
        del tensors
        whole = self._whole[_name(join)]
        whole.left -= rows
        return None if whole.left else self._whole.pop(_name(join)).tensors

    def abandon(self) -> None:
        """Drop all transfers after a failed step: its messages must not reach the next one."""
        self._transport.abandon()
        self._under_way.clear()
        self._waiting.clear()
        self._whole.clear()


def _name(action: Action) -> Action:
    """Return the action without part and place, common to all parts of a transfer."""
    kind, stage, microbatch, layers, subject, *_ = action
    return Action(kind, stage, microbatch, layers, subject)


def _check_planned(action: Action, target: int, tensors: Sequence[Tensor], values: Sequence[Value]) -> None:
    """Check that sent tensors are as device `target` expects.

    Raises:
        UsageError: the tensors have other shapes or dtypes.
    """
    sent = [(tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in tensors]
    planned = [(value.shape, value.dtype) for value in values]
    if sent != planned:
        raise UsageError(
            f"{action} would send {_described(sent)}, but by the plan device {target} allocates "
            f"{_described(planned)}: the model made other tensors than when it was profiled. Profile and "
            "plan it again with such inputs"
        )


def _described(tensors: Sequence[tuple[tuple[int, ...], str]]) -> str:
    """Return shapes and dtypes as text."""
    return (
        ", ".join(f"{'x'.join(map(str, shape)) or 'one number'} of {dtype}" for shape, dtype in tensors)
        or "nothing"
    )
