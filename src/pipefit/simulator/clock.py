"""The virtual clock: when every action ends and every transfer runs.

A device runs on until it must wait for a transfer that has no begin yet. When every device waits, the earliest of the
ready transfers, which a heap holds, gets its wires: no other transfer can become ready before it. A transfer begins
when all its wires are free, so those that share a wire run in the order in which they became ready.

Costs: a microsecond per action.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from pipefit.simulator.timed_device import COMPUTE, COPY, JOIN, NOTHING, STREAMS
from pipefit.simulator.timed_program import TimedProgram


class Clock:
    """Runs a timed program for `steps` steps.

    `after[device]` lists when each action ended; an action begins when the one before it has ended. `begins` and `ends`
    are the times of the transfers. All three hold one step after the other. `finished[step]` is when the last device
    ended that step.
    """

    def __init__(self, program: TimedProgram, steps: int) -> None:
        self._program, self._steps = program, steps
        self._count = len(program.parts)
        devices = len(program.devices)
        self._now, self._at, self._step = [0.0] * devices, [0] * devices, [0] * devices
        self._posted = [0.0] * (self._count * steps)
        self._missing = program.ends * steps
        self._waiting: dict[int, list[int]] = {}
        self._wire_free = [0.0] * program.wires
        self._stream_free = [0.0] * (STREAMS * devices)
        self._stream_queues: list[deque[tuple[float, int]]] = [deque() for _ in range(STREAMS * devices)]
        self._stream_waits = [False] * (STREAMS * devices)  # its first copy is in the heap
        self._heap: list[tuple[float, int]] = []  # when a transfer is ready; its number breaks ties
        self.after: list[list[float]] = [[] for _ in program.devices]
        self.begins = [0.0] * (self._count * steps)
        self.ends = [-1.0] * (self._count * steps)
        self.finished = [0.0] * steps
        self._run()

    def _run(self) -> None:
        runnable = [device for device, actions in enumerate(self._program.devices) if actions.codes]
        heap, waiting = self._heap, self._waiting
        while True:
            for device in runnable:
                self._advance(device)
            if not heap:
                break
            ready, transfer = heappop(heap)
            self._transfer(ready, transfer)
            runnable = waiting.pop(transfer, [])
        steps = [step for step, actions in zip(self._step, self._program.devices, strict=True) if actions.codes]
        assert min(steps, default=self._steps) == self._steps, "message_order refuses programs that would hang"

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
                if end > now:
                    now = end
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
        """A device has started its end of a message or collective, which is ready when the last one has."""
        ready = self._posted[transfer] = max(now, self._posted[transfer])
        self._missing[transfer] -= 1
        if self._missing[transfer]:
            return
        if self._program.parts[transfer % self._count]:
            heappush(self._heap, (ready, transfer))
        else:
            self.begins[transfer] = self.ends[transfer] = ready

    def _copy(self, transfer: int, now: float) -> None:
        """A copy is ready when the one before it in its stream has ended."""
        stream = self._program.streams[transfer % self._count]
        if self._stream_waits[stream]:
            self._stream_queues[stream].append((now, transfer))
        else:
            self._stream_waits[stream] = True
            heappush(self._heap, (max(now, self._stream_free[stream]), transfer))

    def _transfer(self, ready: float, transfer: int) -> None:
        """Give a ready transfer its wires; if it is a copy, the next one of its stream may become ready."""
        number, free = transfer % self._count, self._wire_free
        first, last = float("inf"), ready
        for seconds, wires in self._program.parts[number]:
            begin = ready
            for wire in wires:
                if free[wire] > begin:
                    begin = free[wire]
            end = begin + seconds
            for wire in wires:
                free[wire] = end
            if begin < first:
                first = begin
            if end > last:
                last = end
        self.begins[transfer], self.ends[transfer] = first, last
        stream = self._program.streams[number]
        if stream >= 0:
            self._next_copy(stream, last)

    def _next_copy(self, stream: int, end: float) -> None:
        """The first copy that waits in the stream becomes ready when the one before it ends."""
        self._stream_free[stream] = end
        queue = self._stream_queues[stream]
        self._stream_waits[stream] = bool(queue)
        if queue:
            issued, transfer = queue.popleft()
            heappush(self._heap, (max(issued, end), transfer))
