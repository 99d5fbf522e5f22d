"""Messages by way of the host, for workers that share a GPU: NCCL refuses that, and gloo takes the host's memory.

What is sent is copied to the host first, and what is received lies there until it is joined. So a message takes as much
of the host at either end as of the device, and devices wait for their copies: this is for tests, and for people with
one GPU, not for speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.actions import SENDS, Action, Message
from pipefit.runtime.transport import Owners, Transport


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A transfer between hosts, its buffers there, and the tensors of the device that wait for what is in them."""

    handle: Any
    buffers: list[Tensor]
    waiting: list[Tensor]


@dataclass(frozen=True, slots=True)
class HostBuffers:
    """A transport over `hosts`, another one that takes tensors on the host."""

    hosts: Transport

    def start(self, action: Action, tensors: list[Tensor], message: Message) -> _OnHost:
        sends = action.kind in SENDS
        buffers = [_copied(tensor) if sends else _buffer(tensor) for tensor in tensors]
        return _OnHost(self.hosts.start(action, buffers, message), buffers, [] if sends else tensors)

    def collect(
        self, action: Action, tensors: list[Tensor], members: tuple[int, ...], device: int, owners: Owners = ()
    ) -> _OnHost:
        buffers = list(map(_copied, tensors))
        return _OnHost(self.hosts.collect(action, buffers, members, device, owners), buffers, tensors)

    def ready(self, handle: _OnHost) -> bool:
        return self.hosts.ready(handle.handle)

    def join(self, action: Action, handle: _OnHost) -> None:
        self.hosts.join(action, handle.handle)
        for tensor, buffer in zip(handle.waiting, handle.buffers, strict=False):  # a sender has none that wait
            tensor.copy_(buffer)

    def abandon(self) -> None:
        self.hosts.abandon()


def _buffer(tensor: Tensor) -> Tensor:
    """Memory of the host for a tensor: pinned, if it is for a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copied(tensor: Tensor) -> Tensor:
    """A copy on the host. It is there when this returns, so that gloo may read it."""
    return _buffer(tensor).copy_(tensor)
