"""A GPU that lags behind the host, without one: it computes at once, and copies as late or as early as events allow.

What a tensor holds is what its device would find there, so a join of the computing stream lets bytes arrive in device
memory. Homes, which the host reads and writes too, are those of the host's time: bytes arrive there between the begin
of a copy and the moment at which the host has waited for its event, at random. A copy that comes back reads its home
anywhere in between as well; whoever writes to it meanwhile has been too early, and is found out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from threading import RLock

import torch

from pipefit.program import Program
from pipefit.runtime.copying import Slot
from pipefit.runtime.cuda_copying import OnStream
from pipefit.runtime.hardware import Hardware
from pipefit.runtime.lending import Lending
from pipefit.runtime.memory import HostMemory
from pipefit.schedule.arenas import Arena, arenas_of


@dataclass(eq=False)
class Done:
    """An event behind the first `position` copies of a GPU."""

    gpu: LaggingGpu
    position: int

    def synchronize(self) -> None:
        """The host waits."""
        self.gpu.settle(self.position)


@dataclass(eq=False)
class Copy:
    """A copy that has begun: its bytes once they have been read, and whether they have arrived."""

    target: int
    source: int
    nbytes: int
    read: bytes | None = None
    arrived: bool = False
    checked: bool = False

    def reads(self, other: Copy) -> bool:
        """Whether it reads where the other one writes."""
        return self.source < other.target + other.nbytes and other.target < self.source + self.nbytes

    def overwrites(self, other: Copy) -> bool:
        """Whether both write to the same memory."""
        return self.target < other.target + other.nbytes and other.target < self.target + self.nbytes


class Stream:
    """One of the two streams of a GPU: the first computes, the second copies."""

    def __init__(self, gpu: LaggingGpu, number: int) -> None:
        self.gpu, self.cuda_stream = gpu, number

    def record_event(self) -> Done:
        """An event behind the copies so far; what is computed has been computed at once."""
        return Done(self.gpu, len(self.gpu.copies) if self.cuda_stream == 2 else 0)

    def wait_event(self, event: Done) -> None:
        """The computing stream waits for copies; the stream of copies waits for what has been computed."""
        if self.cuda_stream == 1:
            self.gpu.join(event.position)

    def synchronize(self) -> None:
        """The host waits for all."""
        self.gpu.settle(len(self.gpu.copies))


class LaggingGpu:
    """A driver that copies plain memory, and the copies that it was given; `homes` is the memory of homes."""

    def __init__(self, rng: Random, homes: list[Slot]) -> None:
        self.rng, self.homes, self.copies = rng, homes, list[Copy]()
        self.settled = 0  # so many copies has the host waited for
        self.wrong: list[str] = []
        self.far_behind = False
        self._lock = RLock()  # updates on the host wait on threads of theirs
        computing = Stream(self, 1)
        self.copier = OnStream(Stream(self, 2), lambda: computing, self, nullcontext)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- the driver

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy, which may be carried out at once, with all before it."""
        assert stream == 2
        with self._lock:
            self.copies.append(Copy(target, source, nbytes))
            if not self.far_behind and self.rng.random() < 0.3:
                self._all_until(len(self.copies))

    def export(self, address: int) -> tuple[bytes, int]:
        """Nothing is shared here."""
        raise AssertionError

    def open(self, handle: bytes) -> int:
        """Nothing is shared here."""
        raise AssertionError

    def close(self, start: int) -> None:
        """Nothing is shared here."""
        raise AssertionError

    # ---------------------------------------------------------------- who waits for the first copies

    def join(self, position: int) -> None:
        """The computing stream: they have read what they copy, and have arrived on the device."""
        with self._lock:
            if self.far_behind:
                return
            for copy in self.copies[self.settled : position]:
                self._read(copy)
                if not self._at_home(copy.target):
                    self._arrive(copy)

    def settle(self, position: int) -> None:
        """The host: they have arrived wherever they go, and may have read their homes as late as now."""
        with self._lock:
            self._all_until(position)
            for copy in self.copies[self.settled : position]:
                self._check(copy)
            self.settled = max(self.settled, position)

    # ---------------------------------------------------------------- one copy

    def _all_until(self, position: int) -> None:
        for copy in self.copies[self.settled : position]:
            self._arrive(copy)

    def _read(self, copy: Copy) -> None:
        """What was to arrive at a home before has arrived."""
        if copy.read is None:
            for earlier in self._before(copy) if self._at_home(copy.source) else ():
                if copy.reads(earlier):
                    self._arrive(earlier)
            copy.read = ctypes.string_at(copy.source, copy.nbytes)

    def _arrive(self, copy: Copy) -> None:
        """Whoever was to write to the same home before has written, and whoever was to read from it has read."""
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
        """Nobody has written to a home that was being read."""
        if not copy.checked and self._at_home(copy.source) and copy.read != self._now(copy):
            self.wrong.append(f"{copy.nbytes} bytes of a home were written while they were read")
        copy.checked = True

    def _now(self, copy: Copy) -> bytes:
        return ctypes.string_at(copy.source, copy.nbytes)

    def _before(self, copy: Copy) -> list[Copy]:
        return self.copies[self.settled : self.copies.index(copy)]

    def _at_home(self, address: int) -> bool:
        return any(home.address <= address < home.address + home.nbytes for home in self.homes)


class _Homes(HostMemory):
    """Plain memory that says where it is, and lasts as long as what it says."""

    homes: list[Slot]

    def own(self, arena: Arena) -> list[Slot]:
        slots = super().own(arena)
        self.homes += slots
        return slots


class Machine:
    """GPUs without bytes of their own: what they copy goes between tensors and plain memory."""

    def __init__(self, seed: int) -> None:
        self.rng, self.gpus, self.homes = Random(seed), list[LaggingGpu](), list[Slot]()

    def lending(self, hardware: Hardware, program: Program) -> Lending:
        """Stands for `Lending.within`."""
        arenas = arenas_of(hardware.plan, program)
        memory = _Homes(hardware.plan.cluster, arenas)
        memory.homes = self.homes
        return Lending(arenas, self._copier, memory)

    def _copier(self, device: torch.device) -> OnStream:
        self.gpus.append(LaggingGpu(self.rng, self.homes))
        return self.gpus[-1].copier

    @contextmanager
    def far_behind(self) -> Iterator[None]:
        """Inside, between steps, devices come to nothing that is launched: only what the host waits for is done."""
        for gpu in self.gpus:
            gpu.far_behind = True
        try:
            yield
        finally:
            for gpu in self.gpus:
                gpu.far_behind = False

    def check(self) -> None:
        """Nobody has written to a home too early."""
        for gpu in self.gpus:
            gpu.settle(len(gpu.copies))
            assert not gpu.wrong
