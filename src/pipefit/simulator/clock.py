"""The virtual clock: end times of actions, and start and end times of transfers.

A device runs until it must wait for a transfer that has not ended. When all devices wait, the earliest event
in a heap happens: a part of a transfer ends, or a transfer becomes ready. No device can start a transfer
before that time anymore. Of simultaneous events, ends come first, and then transfers in the order of their
numbers.

A part of a transfer starts when its wires are free of all parts that became ready before it. While the other
direction of a wire's link is busy, the part runs at the fraction `slowed` of its rate; so whenever a part
starts or ends, the end of the part in the other direction is computed again.

The clock is compiled when pipefit is installed (`clock.c`). Without a compiler `_Interpreted` runs instead,
with the same times to the last bit.

Cost: up to a fourth of a microsecond per action, with the arrays for the compiled clock; without a compiler
four times as much. `Times` derives the seconds of steps from the clock, and `repeating` those of a step in a
long run.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.simulator.timed_program import (
    COMPUTE,
    COPY,
    JOIN,
    NOTHING,
    RECEIVE,
    STREAMS,
    FlatProgram,
    TimedProgram,
)

Floats = NDArray[np.float64]

_END, _READY = 0, 1  # kinds of events, in the order of simultaneous ones


class _TransferPart:
    """Part of a transfer, from the time it is ready until it ends."""

    __slots__ = ("ahead", "end", "left", "since", "slowed", "speed", "transfer", "wires")

    def __init__(
        self, transfer: int, seconds: float, wires: tuple[int, ...], slowed: tuple[float, ...]
    ) -> None:
        self.transfer, self.wires = transfer, wires
        self.slowed = slowed  # empty if the other direction does not slow it
        self.left = seconds  # seconds left at full speed, at time `since`
        self.ahead = 0  # wires that it waits for; zero when it runs
        self.speed = 1.0
        self.since = 0.0
        self.end = -1.0  # not known yet


class Clock(NamedTuple):
    """Times in a run of a timed program.

    `after[device]` lists the end of each action; an action starts at the end of the one before. `begins` and
    `ends` are the times of the transfers. All three hold one step after the other. `finished[step]` is the
    time at which the last device ended that step.
    """

    after: Sequence[Sequence[float]]
    begins: Sequence[float]
    ends: Sequence[float]
    finished: Sequence[float]

    @staticmethod
    def of(program: TimedProgram, steps: int) -> Clock:
        """Return the times in `steps` steps, by the compiled clock if there is one."""
        return _interpreted(program, steps) if _LIBRARY is None else _compiled(_LIBRARY, program, steps)


class _Interpreted:
    """Run of a timed program for `steps` steps, with the attributes of `Clock`."""

    def __init__(self, program: TimedProgram, steps: int) -> None:
        self._program, self._steps = program, steps
        self._count = len(program.parts)
        devices = len(program.devices)
        self._now, self._at, self._step = [0.0] * devices, [0] * devices, [0] * devices
        self._posted = [0.0] * (self._count * steps)
        self._missing = program.ends * steps
        self._waiting: dict[int, list[int]] = {}
        opposite = self._opposite = program.opposite
        self._parts = [
            [
                (s, wires, slowed if any(opposite[wire] >= 0 for wire in wires) else ())
                for s, wires, slowed in parts
            ]
            for parts in program.parts
        ]
        self._lines: list[deque[_TransferPart]] = [
            deque() for _ in self._opposite
        ]  # queues of wires; the first part may run
        self._parts_left: dict[int, int] = {}  # of transfers of several parts
        self._stream_queues: list[deque[tuple[float, int]]] = [deque() for _ in range(STREAMS * devices)]
        self._stream_busy = [False] * (STREAMS * devices)
        self._events: list[tuple[float, int, int, _TransferPart | None]] = []
        self._serial = 0  # of ends, to tell them apart
        self.after: list[list[float]] = [[] for _ in program.devices]
        self.begins = [-1.0] * (self._count * steps)
        self.ends = [-1.0] * (self._count * steps)
        self.finished = [0.0] * steps
        self._run()

    def _run(self) -> None:
        events = self._events
        for device, actions in enumerate(self._program.devices):
            if actions.codes:
                self._advance(device)
        while events:
            time, _, number, part = heappop(events)
            if part is None:
                self._queue(number, time)
            elif part.end == time and part.left >= 0.0:  # otherwise its end has been computed again
                self._end(part, time)
        steps = [
            step for step, actions in zip(self._step, self._program.devices, strict=True) if actions.codes
        ]
        assert min(steps, default=self._steps) == self._steps, (
            "message_order refuses programs that would hang"
        )

    def _advance(self, device: int) -> None:
        """Run `device` until it blocks or has done all its steps."""
        codes, seconds, transfers = self._program.devices[device]
        count, ends, after = len(codes), self.ends, self.after[device]
        now, at, step = self._now[device], self._at[device], self._step[device]
        base = step * self._count
        while step < self._steps:
            code = codes[at]
            if code == JOIN:
                end = ends[base + transfers[at]]
                if end < 0.0:
                    self._waiting.setdefault(base + transfers[at], []).append(device)
                    break
                now = max(now, end)
            elif code == COMPUTE:
                now += seconds[at]
            elif code == COPY:
                self._copy(base + transfers[at], now)
                now += seconds[at]
            elif code != NOTHING:
                self._post(base + transfers[at], now)
                now += seconds[at]
            after.append(now)
            at += 1
            if at == count:
                self.finished[step] = max(self.finished[step], now)
                step, at, base = step + 1, 0, base + self._count
        self._now[device], self._at[device], self._step[device] = now, at, step

    def _post(self, transfer: int, now: float) -> None:
        """Start a device's end of a message or collective, which is ready when all ends have started."""
        ready = self._posted[transfer] = max(now, self._posted[transfer])
        self._missing[transfer] -= 1
        if self._missing[transfer]:
            return
        if self._program.parts[transfer % self._count]:
            heappush(self._events, (ready, _READY, transfer, None))
        else:
            self.begins[transfer] = self.ends[transfer] = ready

    def _copy(self, transfer: int, now: float) -> None:
        """Issue a copy, which is ready when the one before it in its stream has ended."""
        stream = self._program.streams[transfer % self._count]
        if self._stream_busy[stream]:
            self._stream_queues[stream].append((now, transfer))
        else:
            self._stream_busy[stream] = True
            heappush(self._events, (now, _READY, transfer, None))

    # ---- Parts of transfers, and their wires

    def _queue(self, transfer: int, now: float) -> None:
        """Start the parts of a ready transfer, or put them in the queues of their wires."""
        own, lines = self._parts[transfer % self._count], self._lines
        if len(own) > 1:
            self._parts_left[transfer] = len(own)
        for seconds, wires, slowed in own:
            part = _TransferPart(transfer, seconds, wires, slowed)
            for wire in wires:
                if lines[wire]:
                    part.ahead += 1
                lines[wire].append(part)
            if not part.ahead:
                self._begin(part, now)
        if not own:
            self.begins[transfer] = now
            self._ended(transfer, now)

    def _begin(self, part: _TransferPart, now: float) -> None:
        """Start a part, whose wires are all free."""
        if self.begins[part.transfer] < 0.0:
            self.begins[part.transfer] = now
        part.since = now
        if not part.slowed:
            part.end = now + part.left
            self._serial += 1
            heappush(self._events, (part.end, _END, self._serial, part))
            return
        for wire in part.wires:
            other = self._running(self._opposite[wire])
            if other is not None:
                self._set_speed(other, now)
        self._set_speed(part, now)

    def _set_speed(self, part: _TransferPart, now: float) -> None:
        """Compute the end of a running part at its present speed."""
        speed = 1.0
        for wire, slowed in zip(part.wires, part.slowed, strict=True):
            if slowed < speed and self._running(self._opposite[wire]) is not None:
                speed = slowed
        if speed == part.speed and part.end >= 0.0:
            return
        part.left = max(0.0, part.left - (now - part.since) * part.speed)
        part.since, part.speed = now, speed
        part.end = now + part.left / speed
        self._serial += 1
        heappush(self._events, (part.end, _END, self._serial, part))

    def _running(self, wire: int) -> _TransferPart | None:
        """Return the part that is running on a wire, if any; `wire` -1 stands for none."""
        line = self._lines[wire] if wire >= 0 else None
        return line[0] if line and not line[0].ahead else None

    def _end(self, part: _TransferPart, now: float) -> None:
        """End a part; parts that waited for its wires, or were slowed by it, continue."""
        part.left = -1.0
        for wire in part.wires:
            self._lines[wire].popleft()
        for wire in part.wires:
            line = self._lines[wire]
            if line:
                line[0].ahead -= 1
                if not line[0].ahead:
                    self._begin(line[0], now)
        if part.slowed:
            for wire in part.wires:
                hindered = self._running(self._opposite[wire])
                if hindered is not None:
                    self._set_speed(hindered, now)
        left = self._parts_left.get(part.transfer, 1) if self._parts_left else 1
        if left > 1:
            self._parts_left[part.transfer] = left - 1
        else:
            self._ended(part.transfer, now)

    def _ended(self, transfer: int, now: float) -> None:
        """End a transfer; after a copy, the next issued one of its stream becomes ready."""
        self.ends[transfer] = now
        stream = self._program.streams[transfer % self._count]
        if stream >= 0:
            queue = self._stream_queues[stream]
            self._stream_busy[stream] = bool(queue)
            if queue:
                issued, following = queue.popleft()
                heappush(self._events, (max(issued, now), _READY, following, None))
        for device in self._waiting.pop(transfer, ()):
            self._advance(device)


def _interpreted(program: TimedProgram, steps: int) -> Clock:
    """Return the times in `steps` steps."""
    run = _Interpreted(program, steps)
    return Clock(run.after, run.begins, run.ends, run.finished)


# ---- The compiled clock


class _Program(ctypes.Structure):
    """The arguments of `run_clock` that describe a program, in the order of `clock.c`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("devices", "transfers", "parts", "uses", "wires", "streams")),
        *((name, ctypes.c_void_p) for name in FlatProgram._fields),
    )


def _library(folder: Path = Path(__file__).parent) -> ctypes.CDLL | None:
    """Return the library that was compiled at installation; None if there is none of this source."""
    try:
        result = ctypes.CDLL(str(folder / "_clock.so"))
        result.clock_source.restype = ctypes.c_char_p
        source = result.clock_source().decode()
        return result if source == sha256((folder / "clock.c").read_bytes()).hexdigest() else None
    except (OSError, AttributeError):  # nothing was compiled, or an older version
        return None


_LIBRARY = _library()


def _compiled(library: ctypes.CDLL, program: TimedProgram, steps: int) -> Clock:
    """Return the times in `steps` steps."""
    flat = program.flat
    devices, transfers, parts = (
        len(firsts) - 1 for firsts in (flat.first_action, flat.first_part, flat.first_use)
    )
    after, begins, ends, finished = (
        np.empty(count * steps) for count in (flat.first_action[-1], transfers, transfers, 1)
    )
    counts = devices, transfers, parts, len(flat.wire), len(program.opposite), STREAMS * devices
    arguments = _Program(*counts, *(array.ctypes.data for array in flat))
    results = (ctypes.c_void_p(array.ctypes.data) for array in (after, begins, ends, finished))
    failure = library.run_clock(ctypes.byref(arguments), ctypes.c_int64(steps), *results)
    if failure == _HANGS:
        raise AssertionError("message_order refuses programs that would hang")
    if failure:
        raise MemoryError
    edges = steps * flat.first_action
    of_devices = [after[start:stop].tolist() for start, stop in pairwise(edges)]
    return Clock(of_devices, begins.tolist(), ends.tolist(), finished.tolist())


_HANGS = 1  # result of `run_clock` if devices wait for each other for ever


# ---- Seconds of steps


class Times:
    """Times of a program's steps.

    `counts[device]` are the numbers of its actions in every step. The steps of an asynchronous schedule
    overlap, so they are one program to the clock; otherwise the program is one step, which repeats.
    """

    def __init__(self, program: TimedProgram, counts: Sequence[Sequence[int]], *, endless: bool) -> None:
        self._program, self._counts, self._endless = program, counts, endless
        self._steps = len(counts[0])

    @cached_property
    def clock(self) -> Clock:
        """Start and end times of every action and transfer."""
        return Clock.of(self._program, 1 if self._endless else self._steps)

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of every step: from the end of the step before to its own end, each on the last device."""
        return tuple(end - start for start, end in pairwise((0.0, *self._finished)))

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the last step in which every device computes."""
        length, last = self.step_seconds[-1], [counts[-1] for counts in self._counts]
        busy = [
            sum(timed_actions.seconds[-count:]) if count else 0.0
            for timed_actions, count in zip(self._program.devices, last, strict=True)
        ]
        return tuple(seconds / length if length else 0.0 for seconds in busy)

    def starts(self, device: int) -> list[int]:
        """Return the number of the device's actions before every step, and before the end."""
        return [0, *accumulate(self._counts[device])]

    @property
    def steps_are_apart(self) -> bool:
        """Return whether only receives of a synchronous step take place before the step before ended.

        A device then either waits for a message first, or is the last to end, so all steps are equal.
        """
        after, ends, last = self.clock.after, self.clock.ends, self.clock.finished[0]
        for actions, times in zip(self._program.devices, after, strict=True):
            first = next((code for code in actions.codes if code not in (NOTHING, RECEIVE)), NOTHING)
            if actions.codes and first != JOIN and times[len(actions.codes) - 1] < last:
                return False
        return max(ends[: len(self._program.parts)], default=0.0) <= last

    def runs(self) -> list[Run]:
        """Return the runs of all devices with actions in cycles of one synchronous step.

        They omit the first receives of a step, which may be early, as whoever waits for one shows its time.
        """
        result = list[Run]()
        for actions, after in zip(self._program.devices, self.clock.after, strict=True):
            codes = (n for n, code in enumerate(actions.codes) if code not in (NOTHING, RECEIVE))
            if (first := next(codes, None)) is not None:
                times = np.array(after).reshape(self._steps, -1)[:, first:]
                result.append((times.ravel(), range(0, times.size + 1, times.shape[1])))
        return result

    @cached_property
    def _finished(self) -> Sequence[float]:
        """Times at which the last device ended every step."""
        if not self._endless:
            return self.clock.finished
        ends = [0.0] * self._steps
        for device in range(len(self._counts)):
            after, starts = self.clock.after[device], self.starts(device)
            for step, stop in enumerate(starts[1:]):
                ends[step] = max(ends[step], after[stop - 1] if stop else 0.0)
        return ends


# ---- Seconds of a step in a long run
#
# The last simulated step may be too short, as no later step delays it, and the first ones may differ from all
# later ones. So the simulation continues until cycles repeat:
#
#     cycle 0 | cycle 1 | cycle 2 | cycle 3 | may lack delays by actions after the end
#                            '---------' equal, so all later ones are equal too
#
# A cycle is a step, or a few microbatches under PipeDream.

Run = tuple[
    Floats, Sequence[int]
]  # ends of a device's actions; the first action of each cycle, and their end
_ROUNDING = 1e-9  # part of a cycle


def repeating(runs: Sequence[Run], *, window: int) -> float | None:
    """Return the mean seconds of a cycle once the known cycles repeat, else None.

    They repeat if the last ones, at least `window` and a whole period of them, equal those a period before.
    """
    ends = _known_ends(runs)
    for period in range(1, len(ends) // 2 + 1):
        count = max(window, period)
        if count + period <= len(ends):
            shift = float(ends[-1] - ends[-1 - period])
            if all(_is_shifted(run, len(ends) - count, len(ends), period, shift) for run in runs):
                return shift / period
    return None


def mean_cycle(runs: Sequence[Run]) -> float:
    """Return the mean seconds of the later half of the known cycles."""
    ends = _known_ends(runs)
    half = len(ends) // 2
    return float(ends[-1] - ends[half - 1]) / (len(ends) - half)


def _known_ends(runs: Sequence[Run]) -> Floats:
    """Return the times at which the last device ends each known cycle.

    These are cycles before the first device is at the end of its run, as it would delay others afterwards.
    """
    count = min(len(starts) for _, starts in runs)
    ends = np.max([after[np.array(starts[1:count]) - 1] for after, starts in runs], axis=0)
    result: Floats = ends[ends <= min(after[-1] for after, _ in runs)]
    return result


def _is_shifted(run: Run, first: int, stop: int, period: int, shift: float) -> bool:
    """Return whether a device's cycles from `first` to `stop - 1` repeat those `period` cycles before."""
    after, starts = run
    now = after[starts[first] : starts[stop]]
    before = after[starts[first - period] : starts[stop - period]]
    return len(now) == len(before) and bool(np.all(np.abs(now - before - shift) <= _ROUNDING * shift))
