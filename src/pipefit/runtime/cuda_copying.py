"""Copies of a GPU, beside its computing: on one stream, behind events instead of stops of the host.

Copies of both directions are on one stream, in the order of the program, which alternates them wherever its schedule
alternates forwards and backwards. That was faster than a stream for each direction, which take each other's bandwidth
(PipeOffload, arXiv 2503.01328). A copy begins when all that was launched before its start has been computed: the bytes
that leave are there, and memory for those that come is free. Its join lets the computing stream wait for it. What is
freed or read afterwards is so on the computing stream, whose allocations torch's allocator gives out again in the order
of that stream: no `record_stream`, which would make peaks depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipefit.runtime.copying import Part
from pipefit.runtime.cuda_driver import CudaDriver, Driver


class Queue(Protocol):
    """What is used of a `torch.cuda.Stream`."""

    @property
    def cuda_stream(self) -> int:
        """The driver's name for it."""

    def record_event(self) -> Any:
        """An event behind all that is queued now."""

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on wait for an event."""

    def synchronize(self) -> None:
        """Let the host wait for all that is queued."""


@dataclass(slots=True)
class UnderWay:
    """A copy: the event behind it, and the parts whose storages it needs until it is joined."""

    done: Any
    parts: Sequence[Part]


class OnStream:
    """Copies on the stream `copies`, beside those that compute.

    Args:
        computing: the stream that computes now.
        here: makes the device the current one.
    """

    def __init__(
        self,
        copies: Queue,
        computing: Callable[[], Queue],
        driver: Driver,
        here: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._copies, self._computing, self._driver, self._here = copies, computing, driver, here

    @classmethod
    def of(cls, device: torch.device) -> OnStream:
        """The copies of a GPU."""
        return cls(
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            lambda: torch.cuda.current_stream(device),
            CudaDriver(),
            lambda: torch.cuda.device(device),
        )

    def start(self, parts: Sequence[Part], *, outward: bool, seconds: float) -> UnderWay:
        with self._here():
            self._copies.wait_event(self._computing().record_event())
            for storage, offset, slot, within, nbytes in parts:
                here, there = storage.data_ptr() + offset, slot.address + within
                target, source = (there, here) if outward else (here, there)
                self._driver.copy(target, source, nbytes, self._copies.cuda_stream)
            return UnderWay(self._copies.record_event(), parts)

    def join(self, handle: UnderWay) -> None:
        self._computing().wait_event(handle.done)
        handle.parts = ()

    def abandon(self) -> None:
        self._copies.synchronize()
