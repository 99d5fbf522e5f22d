"""The CPU allocator's own events: what a call takes and gives back, in order, and its highest moment.

They are those that `torch.profiler` shows with `profile_memory`, read through the older and smaller of torch's two
profilers. It starts in a tenth of a millisecond where the newer one takes a second the first time, prints nothing,
touches no GPU, and does not mind that somebody else is profiling. It sees what the calling thread allocates: a row of
scratch that each thread of a parallel region takes for itself is in nobody's account.

The call runs on a thread of its own, where no dispatch mode, no fake tensors, no autocast and no profiler are active,
below autograd as in a dispatch mode, with torch's random state put back afterwards. Torch's private interfaces for all
this are touched here and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import (  # type: ignore[attr-defined]
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)

T = TypeVar("T")


def apart(call: Callable[[], T]) -> T:
    """What `call` returns, or raises, on a thread of its own."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            raised.append(error)

    thread = threading.Thread(target=run, name="pipefit-measuring")
    thread.start()
    thread.join()
    if raised:
        raise raised.pop()  # not to be kept by a frame that it keeps
    return found.pop()


def peak_of(call: Callable[[], T]) -> tuple[int, T]:
    """The most bytes that `call` held above what was there before, and what it returned. For use inside `apart`."""
    state = torch.get_rng_state()
    _enable_profiler_legacy(_memory_only())
    try:
        with torch._C._AutoDispatchBelowAutograd():
            out = call()
    finally:
        threads = _disable_profiler_legacy()
        torch.set_rng_state(state)
    changes = [
        event.cpu_memory_usage() for events in threads for event in events if str(event.kind()) == "memory_alloc"
    ]
    return max(accumulate(changes), default=0), out


def _memory_only() -> ProfilerConfig:
    """No shapes, but memory; no stacks, FLOPs or modules."""
    return ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
