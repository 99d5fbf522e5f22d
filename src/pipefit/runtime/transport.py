"""How boundary tensors travel: between processes over `torch.distributed`, or inside one process.

A transport starts a transfer and answers with a handle; `ready` tells whether joining it would block, `join` waits. The
receiver allocates its buffers before the transfer starts, the sender keeps its own until it has joined.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from pipefit.errors import PeerLost
from pipefit.program import Action, Kind, message_partner


class Transport(Protocol):
    """What a device reader needs of the network."""

    def start(self, action: Action, tensors: list[Tensor], peer: int) -> Any:
        """Begin to send `tensors` to device `peer`, or to receive them from it; a handle to join."""

    def collect(self, action: Action, tensor: Tensor, members: tuple[int, ...]) -> Any:
        """Begin to add up `tensor` over the stages `members`, in place on each; a handle to join."""

    def ready(self, handle: Any) -> bool:
        """Whether `join` would return at once."""

    def join(self, action: Action, handle: Any) -> None:
        """Return when the transfer is complete."""

    def abandon(self) -> None:
        """Forget what is under way: a step has failed, and its messages must not reach the next one."""


@dataclass(slots=True)
class _Letter:
    """A message inside one process: two ends that must meet, then a copy."""

    sent: list[Tensor] | None = None
    buffers: list[Tensor] | None = None
    done: bool = False

    def deliver(self) -> None:
        if self.sent is not None and self.buffers is not None:
            for buffer, tensor in zip(self.buffers, self.sent, strict=True):
                buffer.copy_(tensor)
            self.sent = self.buffers = None
            self.done = True


@dataclass(slots=True)
class _Sum:
    """A collective inside one process: what every stage contributes, added up in the order of the stages."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    done: bool = False

    def add_up(self) -> None:
        first, *others = (self.tensors[stage] for stage in sorted(self.tensors))
        for other in others:
            first.add_(other)
        for other in others:
            other.copy_(first)
        self.tensors.clear()
        self.done = True


@dataclass(slots=True)
class Mailroom:
    """The transport inside one process: a letter is delivered when both ends have started."""

    letters: dict[Action, _Letter] = field(default_factory=dict)
    sums: dict[Action, _Sum] = field(default_factory=dict)

    def start(self, action: Action, tensors: list[Tensor], peer: int) -> _Letter:
        sending = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        key = action if sending else message_partner(action)
        assert key is not None
        letter = self.letters.pop(key, None)
        if letter is None:
            letter = self.letters[key] = _Letter()
        if sending:
            letter.sent = tensors
        else:
            letter.buffers = tensors
        letter.deliver()
        return letter

    def collect(self, action: Action, tensor: Tensor, members: tuple[int, ...]) -> _Sum:
        key = action._replace(stage=members[0])
        total = self.sums.setdefault(key, _Sum())
        total.tensors[action.stage] = tensor
        if len(total.tensors) == len(members):
            del self.sums[key]
            total.add_up()
        return total

    def ready(self, handle: _Letter | _Sum) -> bool:
        return handle.done

    def join(self, action: Action, handle: _Letter | _Sum) -> None:
        assert handle.done

    def abandon(self) -> None:
        self.letters.clear()
        self.sums.clear()


@dataclass(slots=True)
class Network:
    """The transport between processes: `torch.distributed` point to point, with a timeout on every wait."""

    timeout: timedelta
    ranks: dict[int, int]  # device -> the worker that runs it
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)  # of the stages that add up

    def start(self, action: Action, tensors: list[Tensor], peer: int) -> list[dist.Work]:
        sending = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        backward = action.kind in (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)
        begin = dist.isend if sending else dist.irecv
        handles = []
        for number, tensor in enumerate(tensors):
            tag = ((action.microbatch or 0) * 2 + backward) * 64 + number
            try:
                work = begin(tensor, self.ranks[peer], tag=tag)
            except RuntimeError as error:
                raise PeerLost(f"{action} failed: device {peer} is gone ({_first_line(error)})") from error
            assert work is not None
            handles.append(work)
        return handles

    def collect(self, action: Action, tensor: Tensor, members: tuple[int, ...]) -> list[dist.Work]:
        try:
            work = dist.all_reduce(tensor, group=self.groups[members], async_op=True)
        except RuntimeError as error:
            raise PeerLost(f"{action} failed: another stage is gone ({_first_line(error)})") from error
        assert work is not None
        return [work]

    def ready(self, handle: list[dist.Work]) -> bool:
        return True  # joining may block: nothing else runs in this process

    def join(self, action: Action, handle: list[dist.Work]) -> None:
        for work in handle:
            try:
                work.wait(self.timeout)
            except RuntimeError as error:
                raise PeerLost(
                    f"{action} failed: the device at its other end is gone or hangs ({_first_line(error)})"
                ) from error

    def abandon(self) -> None:
        """Nothing to forget: a worker whose step failed ends, and its connections with it."""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
