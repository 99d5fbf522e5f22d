"""Simulated GPU that lags after the host: it computes at once, and copies as late or early as events allow.

A tensor holds the bytes that its device would read, so a join of the computing stream lets bytes arrive in
device memory. Homes, which the host reads and writes too, follow the host's time: bytes arrive there at
random between the start of a copy and the moment at which the host has waited for its event. A reload reads
its home at any time in between as well; a write in that interval is too early and is detected.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from threading import RLock

import torch

from pipefit.memory.arenas import Arena, arenas_of
from pipefit.runtime.hardware import Hardware
from pipefit.runtime.offload.copying import Slot
from pipefit.runtime.offload.cuda import OnStreams
from pipefit.runtime.offload.lending import HostMemory, Lending
from pipefit.schema.program import Program

Clock = dict[int, int]  # of every stream, how many of its copies come before


@dataclass(eq=False)
class Done:
    """An event of a GPU, after the copies of its clock."""

    gpu: LaggingGpu
    clock: Clock

    def synchronize(self) -> None:
        """Make the host wait."""
        self.gpu.settle(self.clock)


@dataclass(eq=False)
class Copy:
    """A started copy, the `position`-th of its stream, after the copies of its clock: its bytes once they
    have been read, and whether they have arrived.
    """

    target: int
    source: int
    nbytes: int
    stream: int
    position: int
    clock: Clock
    read: bytes | None = None
    arrived: bool = False
    checked: bool = False

    def is_in(self, clock: Clock) -> bool:
        """Return whether it is one of the copies of a clock."""
        return self.position < clock.get(self.stream, 0)

    def reads(self, other: Copy) -> bool:
        """Return whether it reads memory that the other one writes."""
        return self.source < other.target + other.nbytes and other.target < self.source + self.nbytes

    def overwrites(self, other: Copy) -> bool:
        """Return whether both write to the same memory."""
        return self.target < other.target + other.nbytes and other.target < self.target + self.nbytes


class Stream:
    """A stream of a GPU: the first computes, all others copy."""

    def __init__(self, gpu: LaggingGpu, number: int) -> None:
        self.gpu, self.cuda_stream, self.clock = gpu, number, Clock()

    def record_event(self) -> Done:
        """Record an event after the copies so far; computations complete at once."""
        return Done(self.gpu, dict(self.clock))

    def wait_event(self, event: Done) -> None:
        """Order later work after an event."""
        self.clock = later(self.clock, event.clock)
        if self.cuda_stream == 1:
            self.gpu.join(event.clock)

    def synchronize(self) -> None:
        """Make the host wait for all work."""
        self.gpu.settle(self.clock)


def later(one: Clock, other: Clock) -> Clock:
    """Return the later of two clocks."""
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in {**one, **other}}


class LaggingGpu:
    """A driver that copies plain memory, and its copies; `homes` is the memory of homes."""

    def __init__(self, rng: Random, homes: list[Slot]) -> None:
        self.rng, self.homes, self.copies = rng, homes, list[Copy]()
        self.settled = Clock()  # what the host has waited for
        self.wrong: list[str] = []
        self.far_behind = False
        self._lock = RLock()  # updates on the host wait on threads of theirs
        self.streams = [Stream(self, 1)]
        self.copier = OnStreams(self._stream, lambda: self.streams[0], self, nullcontext)  # type: ignore[arg-type, return-value]

    def _stream(self) -> Stream:
        self.streams.append(Stream(self, len(self.streams) + 1))
        return self.streams[-1]

    # ---------------------------------------------------------------- the driver

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy, which may run at once together with all before it."""
        assert stream > 1
        own = self.streams[stream - 1]
        with self._lock:
            position = own.clock.get(stream, 0)
            copy = Copy(target, source, nbytes, stream, position, dict(own.clock))
            self._check_order(copy)
            own.clock = {**own.clock, stream: position + 1}
            self.copies.append(copy)
            if not self.far_behind and self.rng.random() < 0.3:
                self._all_in(own.clock)

    def export(self, address: int) -> tuple[bytes, int]:
        """Export nothing."""
        raise AssertionError

    def open(self, handle: bytes) -> int:
        """Open nothing."""
        raise AssertionError

    def close(self, start: int) -> None:
        """Close nothing."""
        raise AssertionError

    # ---------------------------------------------------------------- waiting for copies

    def join(self, clock: Clock) -> None:
        """Join the computing stream: copies have read their source and arrived on the device."""
        with self._lock:
            if self.far_behind:
                return
            for copy in self._open(clock):
                self._read(copy)
                if not self._at_home(copy.target):
                    self._arrive(copy)

    def settle(self, clock: Clock) -> None:
        """Settle for the host: copies have arrived, and may have read their homes as late as now."""
        with self._lock:
            self._all_in(clock)
            for copy in self._open(clock):
                self._check(copy)
            self.settled = later(self.settled, clock)

    def settle_all(self) -> None:
        """Make the host wait for every stream."""
        for stream in self.streams:
            stream.synchronize()

    # ---------------------------------------------------------------- one copy

    def _open(self, clock: Clock) -> list[Copy]:
        """Return the copies of a clock that the host has not waited for."""
        return [copy for copy in self.copies if copy.is_in(clock) and not copy.is_in(self.settled)]

    def _all_in(self, clock: Clock) -> None:
        for copy in self._open(clock):
            self._arrive(copy)

    def _check_order(self, copy: Copy) -> None:
        """Check that unordered copies of different streams do not share memory, unless both only read it."""
        for other in self.copies:
            ordered = other.is_in(copy.clock) or other.is_in(self.settled)
            if not ordered and (copy.reads(other) or other.reads(copy) or copy.overwrites(other)):
                self.wrong.append(f"{copy.nbytes} bytes are copied while another copy uses them")

    def _read(self, copy: Copy) -> None:
        """Read after all earlier writes to the home have arrived."""
        if copy.read is None:
            for earlier in self._before(copy) if self._at_home(copy.source) else ():
                if copy.reads(earlier):
                    self._arrive(earlier)
            copy.read = ctypes.string_at(copy.source, copy.nbytes)

    def _arrive(self, copy: Copy) -> None:
        """Write after all earlier writes to the home have arrived and all earlier reads have finished."""
        if copy.arrived:
            return
        self._read(copy)
        for earlier in self._before(copy) if self._at_home(copy.target) else ():
            if copy.overwrites(earlier):
                self._arrive(earlier)
            if earlier.reads(copy):
                self._read(earlier)
                self._check(earlier)
        assert copy.read is not None
        ctypes.memmove(copy.target, copy.read, copy.nbytes)
        copy.arrived = True

    def _check(self, copy: Copy) -> None:
        """Check that no home was written while it was read."""
        if not copy.checked and self._at_home(copy.source) and copy.read != self._now(copy):
            self.wrong.append(f"{copy.nbytes} bytes of a home were written while they were read")
        copy.checked = True

    def _now(self, copy: Copy) -> bytes:
        return ctypes.string_at(copy.source, copy.nbytes)

    def _before(self, copy: Copy) -> list[Copy]:
        return self._open(copy.clock)

    def _at_home(self, address: int) -> bool:
        return any(home.address <= address < home.address + home.nbytes for home in self.homes)


class _Homes(HostMemory):
    """Plain memory with an address, alive as long as the address is in use."""

    homes: list[Slot]

    def own(self, arena: Arena) -> list[Slot]:
        slots = super().own(arena)
        self.homes += slots
        return slots


class Machine:
    """GPUs without separate bytes: they copy between tensors and plain memory."""

    def __init__(self, seed: int) -> None:
        self.rng, self.gpus, self.homes = Random(seed), list[LaggingGpu](), list[Slot]()

    def lending(self, hardware: Hardware, program: Program) -> Lending:
        """Replace `Lending.within`."""
        arenas = arenas_of(hardware.plan, program)
        memory = _Homes(hardware.plan.cluster, arenas)
        memory.homes = self.homes
        return Lending(arenas, self._copier, memory)

    def _copier(self, device: torch.device) -> OnStreams:
        self.gpus.append(LaggingGpu(self.rng, self.homes))
        return self.gpus[-1].copier

    @contextmanager
    def far_behind(self) -> Iterator[None]:
        """Delay all launched work between steps: only work that the host waits for runs."""
        for gpu in self.gpus:
            gpu.far_behind = True
        try:
            yield
        finally:
            for gpu in self.gpus:
                gpu.far_behind = False

    def check(self) -> None:
        """Check that no home was written too early."""
        for gpu in self.gpus:
            gpu.settle_all()
            assert not gpu.wrong
