"""The virtual clock: when every action ends and every transfer runs.

Devices run until they join a transfer that has not been placed on its wires yet. Transfers are placed in order of the
time at which they are ready, which a heap keeps: when every device is blocked, nothing can become ready before the
earliest transfer in the heap, so it may take its wires. A transfer begins when all its wires are free, and those that
share a wire run in the order in which they were ready.

Costs: a microsecond per action.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from pipefit.errors import UsageError
from pipefit.program import MESSAGES, Program, message_partner
from pipefit.simulator.script import COMPUTE, COPY, JOIN, POST, Script


class Clock:
    """Runs a script `steps` times.

    `after[device]` is when each action ended, all steps in a row; an action begins when the one before it has ended.
    `begins` and `ends` are those of the transfers, all steps in a row. `finished[step]` is when the last device ended
    that step.
    """

    def __init__(self, program: Program, script: Script, steps: int) -> None:
        self._program, self._script, self._steps = program, script, steps
        self._count = len(script.parts)
        devices = len(script.devices)
        self._now, self._at, self._step = [0.0] * devices, [0] * devices, [0] * devices
        self._posted = [0.0] * (self._count * steps)
        self._missing = script.ends * steps
        self._waiting: dict[int, list[int]] = {}
        self._wire_free = [0.0] * script.wires
        self._stream_free = [0.0] * (2 * devices)
        self._stream_queues: list[deque[tuple[float, int]]] = [deque() for _ in range(2 * devices)]
        self._stream_waits = [False] * (2 * devices)  # its head is in the heap
        self._heap: list[tuple[float, int]] = []  # when a transfer is ready; its number breaks ties
        self.after: list[list[float]] = [[] for _ in script.devices]
        self.begins = [0.0] * (self._count * steps)
        self.ends = [-1.0] * (self._count * steps)
        self.finished = [0.0] * steps
        self._run()

    def _run(self) -> None:
        runnable = [device for device, script in enumerate(self._script.devices) if script.codes]
        heap, waiting = self._heap, self._waiting
        while True:
            for device in runnable:
                self._advance(device)
            if not heap:
                break
            ready, transfer = heappop(heap)
            self._place(ready, transfer)
            runnable = waiting.pop(transfer, [])
        self._refuse_deadlock()

    def _advance(self, device: int) -> None:
        """Run `device` until it blocks or has done all its steps."""
        codes, seconds, transfers = self._script.devices[device]
        count, ends, after = len(codes), self.ends, self.after[device]
        now, at, step = self._now[device], self._at[device], self._step[device]
        base = step * self._count
        while step < self._steps:
            code = codes[at]
            if code == COMPUTE:
                now += seconds[at]
            elif code == JOIN:
                end = ends[base + transfers[at]]
                if end < 0.0:
                    self._waiting.setdefault(base + transfers[at], []).append(device)
                    break
                now = max(now, end)
            elif code == COPY:
                self._copy(base + transfers[at], now)
            elif code == POST:
                self._post(base + transfers[at], now)
            after.append(now)
            at += 1
            if at == count:
                self.finished[step] = max(self.finished[step], now)
                step, at, base = step + 1, 0, base + self._count
        self._now[device], self._at[device], self._step[device] = now, at, step

    def _post(self, transfer: int, now: float) -> None:
        """One end of a message or collective is there; with the last one it is ready."""
        ready = self._posted[transfer] = max(now, self._posted[transfer])
        self._missing[transfer] -= 1
        if self._missing[transfer]:
            return
        if self._script.parts[transfer % self._count]:
            heappush(self._heap, (ready, transfer))
        else:
            self.begins[transfer] = self.ends[transfer] = ready

    def _copy(self, transfer: int, now: float) -> None:
        """A copy is ready when the one before it in its stream has ended."""
        stream = self._script.streams[transfer % self._count]
        if self._stream_waits[stream]:
            self._stream_queues[stream].append((now, transfer))
        else:
            self._stream_waits[stream] = True
            heappush(self._heap, (max(now, self._stream_free[stream]), transfer))

    def _place(self, ready: float, transfer: int) -> None:
        """Put a ready transfer on its wires, and bring up the next copy of its stream."""
        number, free = transfer % self._count, self._wire_free
        first, last = float("inf"), ready
        for seconds, wires in self._script.parts[number]:
            begin = ready
            for wire in wires:
                begin = max(begin, free[wire])
            end = begin + seconds
            for wire in wires:
                free[wire] = end
            first = min(first, begin)
            last = max(last, end)
        self.begins[transfer], self.ends[transfer] = first, last
        stream = self._script.streams[number]
        if stream >= 0:
            self._next_copy(stream, last)

    def _next_copy(self, stream: int, end: float) -> None:
        self._stream_free[stream] = end
        queue = self._stream_queues[stream]
        self._stream_waits[stream] = bool(queue)
        if queue:
            issued, transfer = queue.popleft()
            heappush(self._heap, (max(issued, end), transfer))

    def _refuse_deadlock(self) -> None:
        """Raise if a device never reached the end of its program."""
        stuck = [d for d, s in enumerate(self._script.devices) if s.codes and self._step[d] < self._steps]
        if stuck:
            raise UsageError(
                "the program deadlocks: "
                + "; ".join(self._stuck(device) for device in stuck)
                + ". Change the order so that every message is sent and received before both ends wait for it"
            )

    def _stuck(self, device: int) -> str:
        action = self._program.actions[device][self._at[device]]
        missing = f" for {message_partner(action.start)}" if action.kind in MESSAGES else ""
        return f"device {device} waits at {action}{missing}"
