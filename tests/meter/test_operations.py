"""What operations take: the meter, over real tensors and over fake ones, against the allocator's own events."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from operations import OPERATIONS, Run
from pipefit.fake.target import FakeTarget
from pipefit.meter.cpu import Meter
from pipefit.meter.kernels import Kernels


class Marks(TorchDispatchMode):
    """Gives every operator call a range of its own in the profile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        with record_function(f"operation {len(self.names) - 1}"):
            return func(*args, **(kwargs or {}))


def allocated(run: Run) -> tuple[int, list[tuple[str, int]]]:
    """By the allocator's events: the highest level of `run` as a whole, and what each operator call took at most.

    Two runs, because under a dispatch mode the number in `x.add_(1.0)` is made a tensor twice.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as whole:
        run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, Marks() as marks:
        run()
    memory = changes(recorded)
    times = [time for time, _ in memory]
    peaks = {}
    for event in recorded.profiler.kineto_results.events():
        if event.name().startswith("operation "):
            first, last = bisect.bisect_left(times, event.start_ns()), bisect.bisect_right(times, event.end_ns())
            peaks[int(event.name().split()[1])] = highest(memory[first:last])
    return highest(changes(whole)), takers((name, peaks[number]) for number, name in enumerate(marks.names))


def changes(recorded: profile) -> list[tuple[int, int]]:
    """When the allocator gave or took how many bytes, in order."""
    events = recorded.profiler.kineto_results.events()
    return sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0])


def highest(changes: Iterable[tuple[int, int]]) -> int:
    """The highest level above the first."""
    return max(0, *accumulate((nbytes for _, nbytes in changes), initial=0))


def takers(operations: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that took anything. `torch.tensor` makes its result before it is announced, by `lift_fresh`."""
    return [(name, nbytes) for name, nbytes in operations if nbytes > 0 and name != "aten.lift_fresh.default"]


class Spied(Meter):
    """A meter that notes what every operator call takes at most: results and what is inside."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(0, kernels=kernels)
        self.taken: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.total
        out = super().__torch_dispatch__(func, types, args, kwargs)
        known = self.kernels.of(func, args, kwargs or {}, out)
        self.taken.append((str(func), self.total - before if known is None else known.peak_bytes))
        return out


def metered(run: Run) -> tuple[int, list[tuple[str, int]]]:
    """By the meter: the highest level of `run` as a whole, and what each operator call took at most."""
    kernels = Kernels(torch.get_num_threads())
    meter, spied = Meter(0, kernels=kernels), Spied(kernels)
    meter.begin("run")
    with meter:
        run()
    with spied:
        run()
    assert not kernels.memory.unknown
    kernels.keep()
    return meter.end(0, 0.0).total_bytes, takers(spied.taken)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Kernels take other memory on more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_takes_what_the_allocator_saw(name: str, threads: int) -> None:
    """Call by call and as a whole, over real tensors and over fake ones, equal to the byte."""
    run = OPERATIONS[name]
    run()  # what a kernel keeps for the rest of the process is nobody's
    seen = allocated(run)
    assert metered(run) == seen
    with FakeTarget("cpu"):
        assert metered(run) == seen
