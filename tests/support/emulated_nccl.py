"""Programs on an emulated NCCL: every message and sum is an operation on streams, with one communicator for
each line.

Uses neither pipefit's runtime nor torch. A device has a computing stream; each end of a line has a separate
stream, as in torch's process groups. A start makes the line's stream wait for the device's queued work, and a
join makes the device wait for the operation. The host never waits, so that one process plays all devices; a
program that does not finish has hung.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Hashable, Iterator
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass, field
from pathlib import Path

FLOAT, SUM = 7, 0  # of NCCL
Lines = list[list[str]]


@dataclass
class Library:
    """The libraries of an emulation, whose calls must succeed."""

    folder: Path
    cuda: ctypes.CDLL = field(init=False)
    nccl: ctypes.CDLL = field(init=False)

    def __post_init__(self) -> None:
        self.cuda = ctypes.CDLL(str(self.folder / "libcudart.so.13"))
        self.nccl = ctypes.CDLL(str(self.folder / "libnccl.so.2"))

    def made(self, name: str, *arguments: object) -> c_void_p:
        """Return the object that a call writes to its first argument."""
        found = c_void_p()
        self(name, byref(found), *arguments)
        return found

    def __call__(self, name: str, *arguments: object) -> None:
        result = getattr(self.nccl if name.startswith("nccl") else self.cuda, name)(*arguments)
        assert result == 0, f"{name}: {result}"


@dataclass(frozen=True)
class Operation:
    """A start: its line, its end of the line, and its content."""

    line: Hashable
    ends: tuple[int, ...]  # the devices of the line
    sends: bool | None  # None in a sum
    content: Hashable


Reads = Callable[[int, str], Operation | None]  # device and word -> a start, None for a computation


@dataclass
class Player:
    """Player of programs, one after the other."""

    library: Library

    def outcome(self, devices: Lines, read: Reads, *, patience: float = 1.0) -> str:
        """Return whether a program "ends", "hangs", or delivers "other data"."""
        given = (read(device, word) for device, words in enumerate(devices) for word in words)
        starts = [start for start in given if start is not None]
        kinds = sorted({start.content for start in starts}, key=str)
        played = _Played(
            self.library,
            {start.line: self._communicators(start.ends) for start in {s.line: s for s in starts}.values()},
            {content: float(number) for number, content in enumerate(kinds)},
        )
        for device, words in enumerate(devices):
            played.play(device, words, read)
        streams = list(played.streams.values())
        ended = self._all_done(streams, patience)
        right = all(found.value in (-1.0, wanted) for _, found, wanted in played.buffers)
        for end in (end for one in played.communicators.values() for end in one):
            self.library("ncclCommDestroy" if ended else "ncclCommAbort", end)
        assert self._all_done(streams, 30), "an abort frees the streams"
        for event in played.events:
            self.library("cudaEventDestroy", event)
        for stream in streams:
            self.library("cudaStreamDestroy", stream)
        return "other data" if not right else "ends" if ended else "hangs"

    def _communicators(self, members: tuple[int, ...]) -> list[c_void_p]:
        found = (c_void_p * len(members))()
        self.library("ncclCommInitAll", found, len(members), (c_int * len(members))(*[0] * len(members)))
        return [c_void_p(one) for one in found]

    def _all_done(self, streams: list[c_void_p], patience: float) -> bool:
        """Return whether all queued work ends before `patience` seconds pass without progress."""
        state, since = None, time.monotonic()
        while time.monotonic() - since < patience:
            now = tuple(self._state(streams))
            if not any(now):
                return True
            if now != state:
                state, since = now, time.monotonic()
            time.sleep(0.001)
        return False

    def _state(self, streams: list[c_void_p]) -> Iterator[int]:
        return (self.library.cuda.cudaStreamQuery(stream) for stream in streams)


@dataclass
class _Played:
    """One program: its communicators by line, and its messages by content."""

    call: Library
    communicators: dict[Hashable, list[c_void_p]]
    numbers: dict[Hashable, float]
    streams: dict[Hashable, c_void_p] = field(default_factory=dict)  # by device, and by the end of a line
    buffers: list[tuple[c_float, c_float, float]] = field(default_factory=list)  # given, found, to be found
    events: list[c_void_p] = field(default_factory=list)

    def play(self, device: int, words: list[str], read: Reads) -> None:
        """Queue all actions of a device."""
        under_way = dict[str, c_void_p]()
        for word in words:
            start = read(device, word)
            if start is not None:
                under_way[word] = self._start(device, start)
            elif word.replace("WAIT_", "") in under_way:
                self.call(
                    "cudaStreamWaitEvent", self._stream(device), under_way.pop(word.replace("WAIT_", "")), 0
                )

    def _start(self, device: int, start: Operation) -> c_void_p:
        """Start an operation after the device's queued work, and record an event after it."""
        stream, mine = (
            self._stream((start.line, device)),
            self.communicators[start.line][start.ends.index(device)],
        )
        self.call("cudaStreamWaitEvent", stream, self._recorded(self._stream(device)), 0)
        number = self.numbers[start.content]
        given, found = c_float(number), c_float(-1.0)
        if start.sends is None:
            self.call("ncclAllReduce", byref(given), byref(found), c_size_t(1), FLOAT, SUM, mine, stream)
            number *= len(start.ends)
        else:
            (peer,) = (n for n, end in enumerate(start.ends) if end != device)
            name, memory = ("ncclSend", given) if start.sends else ("ncclRecv", found)
            self.call(name, byref(memory), c_size_t(1), FLOAT, peer, mine, stream)
        self.buffers.append((given, found, -1.0 if start.sends else number))
        return self._recorded(stream)

    def _stream(self, name: Hashable) -> c_void_p:
        if name not in self.streams:
            self.streams[name] = self.call.made("cudaStreamCreateWithFlags", 1)
        return self.streams[name]

    def _recorded(self, stream: c_void_p) -> c_void_p:
        event = self.call.made("cudaEventCreateWithFlags", 2)
        self.events.append(event)
        self.call("cudaEventRecord", event, stream)
        return event
